"""Token data as bytes and back.

Invariant: exact: each array is stored as its raw bytes, after one byte that names their type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgpack
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from swarm.states import EpisodeState
from swarm.tokens import ModelCall, Timeline, TokenCounts, Trajectory
from swarm.types import Notes, StepResult

_JSON = json.JSONEncoder(default=str)
_STATE_NAMES = {
    EpisodeState.FINISHED: "waiting",
    EpisodeState.BATCHED: "out",
    EpisodeState.REGISTERED: "over",
    EpisodeState.DELETED: "over",
}
#: The fields of a packed call, of a packed timeline, and the first ones of a packed trajectory, in their order.
_CALL = (
    *("prompt_ids", "response_ids", "logprobs", "min_policy_version", "max_policy_version"),
    *("history", "versions", "finish_reason"),
)
TIMELINE_FIELDS = (
    *("prompt_ids", "response_ids", "response_mask", "logprobs", "min_policy_version", "max_policy_version"),
    *("versions", "num_calls"),
)
_TRAJECTORY = ("task_id", "reward", "credit", "is_success", "num_calls", "log_metrics")


def pack_call(call: ModelCall) -> bytes:
    """The call without its ``call_id``."""
    return _dump(_values(call, _CALL))


def unpack_call(call_id: str, data: bytes) -> ModelCall:
    """The call that :func:`pack_call` was given."""
    return ModelCall(call_id=call_id, **_fields(_CALL, _load(data)))


def finish_reason_of(data: bytes | None) -> str:
    """Why the call that :func:`pack_call` was given ended; empty without one."""
    return "" if data is None else str(_load(data)[-1])


def state_name(state: EpisodeState) -> str:
    """The name under which readers see a state that is stored."""
    return _STATE_NAMES.get(state, str(state))


def pack_trajectory(trajectory: Trajectory, *, without_tokens: bool = False) -> bytes:
    """The trajectory without its ``episode_uuid``, and ``without_tokens`` that are those of its one call."""
    timelines = None if without_tokens else [_values(timeline, TIMELINE_FIELDS) for timeline in trajectory.timelines]
    fields = [getattr(trajectory, name) for name in _TRAJECTORY]
    return _dump([*fields, structs.astuple(trajectory.tokens), timelines])


def pack_counts(counts: TokenCounts) -> bytes:
    """The numbers in the order of their fields."""
    return _dump(structs.astuple(counts))


def unpack_counts(data: bytes | None) -> TokenCounts:
    """The counts that :func:`pack_counts` was given; zeros where there are none."""
    return TokenCounts() if data is None else _counts(_load(data))


def unpack_trajectory(episode_uuid: str, data: bytes, call: bytes | None) -> Trajectory:
    """The trajectory that :func:`pack_trajectory` was given; ``call`` (packed) has the tokens if ``data`` has none."""
    *values, counts, packed = _load(data)
    if packed is not None:
        timelines = [_fields(TIMELINE_FIELDS, values) for values in packed]
    elif call is not None:
        fields = _fields(_CALL, _load(call))
        fields |= {"response_mask": np.ones(len(fields["response_ids"]), np.bool_), "num_calls": 1}
        timelines = [{name: fields[name] for name in TIMELINE_FIELDS}]
    else:
        raise ValueError(f"the call of episode {episode_uuid} is missing")
    return Trajectory(
        episode_uuid=episode_uuid,
        **dict(zip(_TRAJECTORY, values, strict=True)),
        tokens=_counts(counts),
        timelines=[Timeline(**fields) for fields in timelines],
    )


def _counts(numbers: Sequence[int]) -> TokenCounts:
    return TokenCounts(**dict(zip(TokenCounts.__struct_fields__, numbers, strict=True)))


def unpack_step(step: int, batch_id: str, metrics: str, seconds: float) -> StepResult:
    """A step by its columns."""
    return StepResult(step=step, batch_id=batch_id, metrics=json.loads(metrics), seconds=seconds)


def pack_json(value: Any) -> str:
    """ASCII JSON; infinities and NaN as Python writes them, what JSON has no form for as its text.

    Raises:
        RecursionError: it is nested some thousand levels deep.
    """
    return _JSON.encode(value)


def notes_of(output: Mapping[str, Any]) -> Notes:
    """What was noted beside a result, as it was stored."""
    return Notes.model_validate(output.get("notes") or {})


def clean(text: str) -> str:
    """Text that SQLite takes: a lone surrogate, which JSON bodies can carry, becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _values(data: ModelCall | Timeline, names: Sequence[str]) -> list[Any]:
    """The fields of these names, with bytes for arrays."""
    values: list[Any] = [getattr(data, name) for name in names]
    return [_bytes(value) if isinstance(value, np.ndarray) else value for value in values]


def _fields(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """What :func:`_values` was given."""
    fields = dict(zip(names, values, strict=True))
    arrays = {name: _array(value) for name, value in fields.items() if isinstance(value, bytes)}
    return {**fields, **arrays, "versions": [(begin, version) for begin, version in fields["versions"]]}


def _bytes(array: NDArray[Any]) -> bytes:
    """One byte that names the type, then the numbers, little-endian."""
    return array.dtype.char.encode() + array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(data: bytes) -> NDArray[Any]:
    # the copy is aligned, which numbers after the first byte are not
    return np.frombuffer(data, f"<{chr(data[0])}", offset=1).copy()


def _dump(value: Any) -> bytes:
    return cast("bytes", msgpack.packb(value, unicode_errors="surrogatepass"))


def _load(data: bytes) -> Any:
    return msgpack.unpackb(data, unicode_errors="surrogatepass")
