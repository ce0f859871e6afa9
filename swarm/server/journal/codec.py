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
from swarm.tokens import ModelCall, Timeline, TokenCounts, Trajectory, VersionRuns
from swarm.types import Notes

_JSON = json.JSONEncoder(default=str)
#: The names that readers see for these states; they see the other states under their own names.
STATE_NAMES = {
    EpisodeState.FINISHED: "waiting",
    EpisodeState.BATCHED: "out",
    EpisodeState.REGISTERED: "over",
    EpisodeState.DELETED: "over",
}


def pack_call(call: ModelCall) -> bytes:
    """The call without its ``call_id``."""
    return _dump(
        [
            _bytes(call.prompt_ids),
            _bytes(call.response_ids),
            _bytes(call.logprobs),
            call.min_policy_version,
            call.max_policy_version,
            call.history,
            call.versions,
            call.finish_reason,
        ]
    )


def unpack_call(call_id: str, data: bytes) -> ModelCall:
    """The call that :func:`pack_call` was given."""
    prompt, response, logprobs, oldest, newest, history, versions, finish_reason = _load(data)
    return ModelCall(
        call_id=call_id,
        prompt_ids=_array(prompt),
        response_ids=_array(response),
        logprobs=_array(logprobs),
        min_policy_version=oldest,
        max_policy_version=newest,
        versions=_runs(versions),
        finish_reason=finish_reason,
        history=history,
    )


def finish_reason_of(data: bytes) -> str:
    """Why the call that :func:`pack_call` was given ended."""
    return str(_load(data)[-1])


def pack_trajectory(trajectory: Trajectory, *, without_tokens: bool = False) -> bytes:
    """The trajectory without its ``episode_uuid``, and ``without_tokens`` that are those of its one call."""
    timelines = (
        None
        if without_tokens
        else [
            [
                _bytes(timeline.prompt_ids),
                _bytes(timeline.response_ids),
                _bytes(timeline.response_mask),
                _bytes(timeline.logprobs),
                timeline.min_policy_version,
                timeline.max_policy_version,
                timeline.versions,
                timeline.num_calls,
            ]
            for timeline in trajectory.timelines
        ]
    )
    outcome, counts = trajectory, structs.astuple(trajectory.tokens)
    earned = (outcome.reward, outcome.credit, outcome.is_success)
    return _dump([outcome.task_id, *earned, outcome.num_calls, outcome.log_metrics, counts, timelines])


def pack_counts(counts: TokenCounts) -> bytes:
    """The numbers in the order of their fields."""
    return _dump(structs.astuple(counts))


def unpack_counts(data: bytes | None) -> TokenCounts:
    """The counts that :func:`pack_counts` was given; zeros where there are none."""
    return TokenCounts() if data is None else _counts(_load(data))


def unpack_trajectory(episode_uuid: str, data: bytes, call: bytes | None) -> Trajectory:
    """The trajectory that :func:`pack_trajectory` was given; ``call`` (packed) has the tokens if ``data`` has none."""
    task_id, reward, credit, is_success, num_calls, log_metrics, counts, timelines = _load(data)
    if timelines is None:
        if call is None:
            raise ValueError(f"the call of episode {episode_uuid} is missing")
        prompt, response, logprobs, oldest, newest, _, versions, _ = _load(call)
        mask = _bytes(np.ones(len(_array(response)), np.bool_))
        timelines = [(prompt, response, mask, logprobs, oldest, newest, versions, 1)]
    return Trajectory(
        episode_uuid=episode_uuid,
        task_id=task_id,
        reward=reward,
        credit=credit,
        num_calls=num_calls,
        is_success=is_success,
        log_metrics=log_metrics,
        tokens=_counts(counts),
        timelines=[
            Timeline(
                prompt_ids=_array(prompt),
                response_ids=_array(response),
                response_mask=_array(mask),
                logprobs=_array(logprobs),
                min_policy_version=oldest,
                max_policy_version=newest,
                versions=_runs(versions),
                num_calls=calls,
            )
            for prompt, response, mask, logprobs, oldest, newest, versions, calls in timelines
        ],
    )


def _counts(numbers: Sequence[int]) -> TokenCounts:
    return TokenCounts(**dict(zip(TokenCounts.__struct_fields__, numbers, strict=True)))


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


def _runs(runs: list[list[int]]) -> VersionRuns:
    return [(begin, version) for begin, version in runs]


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
