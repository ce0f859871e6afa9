"""Token data whose lengths disagree, and rewards that are no numbers, cannot be built."""

import math

import pytest
from pydantic import ValidationError

from swarm.types import ModelCall, Task, Timeline, WorkflowOutput


def test_a_call_needs_one_logprob_per_token() -> None:
    with pytest.raises(ValidationError, match="3 token ids but 2 log-prob"):
        ModelCall(
            call_id="c",
            prompt_ids=[1],
            response_ids=[1, 2, 3],
            logprobs=[-1.0, -1.0],
            min_policy_version=0,
            max_policy_version=0,
            finish_reason="stop",
        )


def test_a_timeline_needs_one_mask_entry_per_token() -> None:
    with pytest.raises(ValidationError, match="one length"):
        Timeline(
            prompt_ids=[1],
            response_ids=[1, 2],
            response_mask=[1],
            logprobs=[0.0, 0.0],
            min_policy_version=0,
            max_policy_version=0,
            num_calls=1,
        )


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_is_finite(reward: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        WorkflowOutput(reward=reward)


def test_an_empty_task_id_is_refused() -> None:
    with pytest.raises(ValidationError, match="task_id"):
        Task(task_id="")
