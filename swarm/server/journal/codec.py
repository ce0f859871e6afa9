"""Token data as bytes and back.

Invariant: exact. Ids come back as the same integers and log-probabilities as the same doubles; a value that does not
fit its narrow form is stored in the next wider one.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any, cast

import msgpack

from swarm.types import ModelCall, Timeline, Trajectory

#: narrow to wide: bytes, 32 bits, 64 bits (type codes of ``array`` and ``struct``, which agree on these widths)
_INTEGERS = ("B", "i", "q")
_JSON = json.JSONEncoder(default=str)


def pack_call(call: ModelCall) -> bytes:
    """The call without its ``call_id``."""
    return _dump(
        [
            _ints(call.prompt_ids, "i"),
            _ints(call.response_ids, "i"),
            _packed("d", call.logprobs),
            call.min_policy_version,
            call.max_policy_version,
            call.finish_reason,
        ]
    )


def unpack_call(call_id: str, data: bytes) -> ModelCall:
    """The call that :func:`pack_call` was given."""
    prompt, response, logprobs, oldest, newest, finish_reason = _load(data)
    return ModelCall(
        call_id=call_id,
        prompt_ids=_numbers(prompt),
        response_ids=_numbers(response),
        logprobs=_numbers(logprobs),
        min_policy_version=oldest,
        max_policy_version=newest,
        finish_reason=finish_reason,
    )


def finish_reason_of(data: bytes) -> str:
    """Why the call that :func:`pack_call` was given ended."""
    return str(_load(data)[-1])


def is_of(trajectory: Trajectory, call: ModelCall) -> bool:
    """Whether the trajectory's tokens are those of this call and no others."""
    if len(trajectory.timelines) != 1 or trajectory.num_calls != 1:
        return False
    timeline = trajectory.timelines[0]
    return (
        timeline.num_calls == 1
        and timeline.prompt_ids == call.prompt_ids
        and timeline.response_ids == call.response_ids
        and timeline.logprobs == call.logprobs
        and timeline.response_mask.count(1) == len(call.response_ids) == len(timeline.response_mask)
        and timeline.min_policy_version == call.min_policy_version
        and timeline.max_policy_version == call.max_policy_version
    )


def pack_trajectory(trajectory: Trajectory, *, without_tokens: bool = False) -> bytes:
    """The trajectory without its ``episode_uuid``, and without what a call holds that it :func:`is_of`."""
    timelines = (
        None
        if without_tokens
        else [
            [
                _ints(timeline.prompt_ids, "i"),
                _ints(timeline.response_ids, "i"),
                _ints(timeline.response_mask, "B"),
                _packed("d", timeline.logprobs),
                timeline.min_policy_version,
                timeline.max_policy_version,
                timeline.num_calls,
            ]
            for timeline in trajectory.timelines
        ]
    )
    return _dump([trajectory.task_id, trajectory.reward, trajectory.num_calls, trajectory.log_metrics, timelines])


def unpack_trajectory(episode_uuid: str, data: bytes, call: bytes | None) -> Trajectory:
    """The trajectory that :func:`pack_trajectory` was given; ``call`` (packed) has the tokens if ``data`` has none."""
    task_id, reward, num_calls, log_metrics, timelines = _load(data)
    if timelines is None:
        if call is None:
            raise ValueError(f"the call of episode {episode_uuid} is missing")
        prompt, response, logprobs, oldest, newest, _ = _load(call)
        mask = _ints([1] * len(_numbers(response)), "B")
        timelines = [(prompt, response, mask, logprobs, oldest, newest, 1)]
    return Trajectory(
        episode_uuid=episode_uuid,
        task_id=task_id,
        reward=reward,
        num_calls=num_calls,
        log_metrics=log_metrics,
        timelines=[
            Timeline(
                prompt_ids=_numbers(prompt),
                response_ids=_numbers(response),
                response_mask=_numbers(mask),
                logprobs=_numbers(logprobs),
                min_policy_version=oldest,
                max_policy_version=newest,
                num_calls=calls,
            )
            for prompt, response, mask, logprobs, oldest, newest, calls in timelines
        ],
    )


def pack_json(value: Any) -> str:
    """ASCII JSON; infinities and NaN as Python writes them, what JSON has no form for as its text."""
    return _JSON.encode(value)


def clean(text: str) -> str:
    """Text that SQLite takes: a lone surrogate, which JSON bodies can carry, becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _ints(values: Sequence[int], narrow: str) -> bytes:
    for code in _INTEGERS[_INTEGERS.index(narrow) :]:
        try:
            return _packed(code, values)
        except struct.error as exc:
            if code == _INTEGERS[-1]:
                raise ValueError(f"no integers of 64 bits: {exc}") from exc
    raise AssertionError("unreachable: the widest form returns or raises")


def _packed(code: str, values: Sequence[float]) -> bytes:
    """The code, and the values after it. ``array`` would take them twice as slowly."""
    return struct.pack(f"<c{len(values)}{code}", code.encode(), *values)


def _numbers(data: bytes) -> list[Any]:
    found = array(data[:1].decode(), data[1:])
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()


def _dump(value: Any) -> bytes:
    return cast("bytes", msgpack.packb(value, unicode_errors="surrogatepass"))


def _load(data: bytes) -> Any:
    return msgpack.unpackb(data, unicode_errors="surrogatepass")
