"""Token data is exact and read-only; what disagrees cannot be built."""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.tokens import ModelCall, Timeline, Trajectory, WeightSyncs, as_lists, join_runs, logprobs, token_ids

CALL: dict[str, Any] = {
    "call_id": "c",
    "prompt_ids": [1],
    "response_ids": [2, 2**31 - 1],
    "logprobs": [-0.5, 0],
    "min_policy_version": 0,
    "max_policy_version": 1,
    "versions": [(0, 0), (1, 1)],
    "finish_reason": "stop",
    "history": "new",
}
LINE: dict[str, Any] = {
    "prompt_ids": [],
    "response_ids": [1, 2],
    "response_mask": [1, 0],
    "logprobs": [-1.0, 0.0],
    "min_policy_version": 0,
    "max_policy_version": 0,
    "versions": [],
    "num_calls": 1,
}


def test_lists_become_arrays_that_nobody_writes_to() -> None:
    given = np.array([2, 7], np.int32)
    call = ModelCall(**CALL | {"response_ids": given})
    kinds = [array.dtype for array in (call.prompt_ids, call.response_ids, call.logprobs)]
    assert kinds == [np.int32, np.int32, np.float32]
    with pytest.raises(ValueError, match="read-only"):
        call.response_ids[0] = 1
    assert given.flags.writeable and np.shares_memory(given, call.response_ids)
    assert as_lists(ModelCall(**CALL)) == CALL
    assert as_lists(Timeline(**LINE)) == LINE


def test_a_list_may_hold_elements_of_arrays() -> None:
    ids, values = token_ids([1, 2]), logprobs([-0.5, -1.0])
    assert token_ids([*ids, 3]).tolist() == [1, 2, 3]
    assert logprobs([*values, 0.0]).tolist() == [-0.5, -1.0, 0.0]


def test_calls_are_equal_if_all_their_tokens_are() -> None:
    assert ModelCall(**CALL) == ModelCall(**CALL)
    for changed in ({"prompt_ids": [2]}, {"logprobs": [-0.5, -1]}, {"finish_reason": "length"}):
        assert ModelCall(**CALL) != ModelCall(**CALL | changed)


@given(st.lists(st.sampled_from(["token", "token", "token", "sync", "cut", "seen"]), max_size=30), st.integers(0, 3))
def test_each_token_has_the_version_that_sampled_it(events: list[str], kept: int) -> None:
    """A call with one choice, as vLLM and the server see it; ``seen`` is the moment at which vLLM knows its request."""
    syncs = WeightSyncs(kept + 1)
    version = 3
    parts, known = [syncs.begin(version)], False
    truth: list[int] = []
    ended: dict[str, dict[int, int]] = {}

    def held() -> dict[str, dict[int, int]]:
        return {parts[-1].request: {0: len(truth) - parts[-1].begin}} if known else {}

    parts[0].request = "0"
    for event in events:
        if event == "sync":
            version += 1
            syncs.finish(version, {**ended, **held()})
            ended = {}
        elif event == "seen":
            known = True
        elif event == "token" and known:
            truth.append(version)
        elif event == "cut" and known:
            ended[parts[-1].request] = {0: 2**31 - 1}
            parts.append(syncs.begin(version, len(truth)))
            parts[-1].request, known = str(len(parts)), False
    runs = syncs.runs(parts, 0, len(truth), version)
    forgotten = version - 3 > kept + 1
    assert bool(runs) != forgotten
    if runs and truth:
        made = {"versions": join_runs(runs), "min_policy_version": truth[0], "max_policy_version": version}
        line = Timeline(
            **LINE | made | {key: [0] * len(truth) for key in ("response_ids", "response_mask", "logprobs")}
        )
        assert line.token_versions().tolist() == truth


def test_versions_that_are_not_known_are_not_told() -> None:
    syncs = WeightSyncs()
    part = syncs.begin(0)
    assert syncs.runs([part], 0, 5, 0) == [(0, 0)]
    assert syncs.runs([part], 0, 5, 1) == [], "it changed without a sync"
    syncs.finish(1, None)
    assert syncs.runs([part], 0, 5, 1) == []
    assert syncs.runs([syncs.begin(1)], 0, 5, 1) == [(0, 1)]


def test_tokens_are_no_work_for_the_garbage_collector() -> None:
    call, timeline = ModelCall(**CALL), Timeline(**LINE)
    trajectory = Trajectory(episode_uuid="e", task_id="t", reward=0.5, timelines=[timeline], num_calls=1)
    assert not any(gc.is_tracked(one) for one in (call, call.response_ids, timeline, trajectory))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"response_ids": [1, 2, 3]}, "3 token ids but 2 log-prob"),
        ({"response_ids": [1, 2**31]}, "do not fit"),
        ({"response_ids": [1, 2**70]}, "do not fit"),
        ({"response_ids": [1, True]}, "not a sequence of numbers"),
        ({"logprobs": [-0.5, False]}, "not a sequence of numbers"),
        ({"response_ids": [1.0, 2.0]}, "not a sequence of numbers"),
        ({"response_ids": ["1", "2"]}, "not a sequence of numbers"),
        ({"prompt_ids": [[1, 2]]}, "not a sequence of numbers"),
        ({"prompt_ids": [1, None]}, "not a sequence of numbers"),
        ({"logprobs": [-0.5, None]}, "not a sequence of numbers"),
    ],
)
def test_a_call_of_other_values_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelCall(**CALL | changed)


@pytest.mark.parametrize(
    "changed",
    [{"response_mask": [1]}, {"response_mask": [1, 2]}, {"response_ids": [], "response_mask": [], "logprobs": []}],
)
def test_a_timeline_needs_tokens_and_a_mask_for_each(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"one length|do not fit"):
        Timeline(**LINE | changed)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_the_reward_of_a_trajectory_is_finite(reward: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Trajectory(episode_uuid="e", task_id="t", reward=reward, timelines=[Timeline(**LINE)], num_calls=1)
