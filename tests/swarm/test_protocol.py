"""What foreign clients send besides, and what they may not get wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from swarm.protocol import EndEpisodeRequest, EndGroupRequest
from swarm.types import WorkflowOutput


def end(output: Any) -> WorkflowOutput:
    one = {"episode_uuid": "e", "workflow_output": output, "more": 1}
    group = EndGroupRequest.model_validate({"client_uuid": "c", "task_id": "t", "ends": [one]})
    single = EndEpisodeRequest.model_validate({"client_uuid": "c", "task_id": "t", **one})
    assert group.ends[0].workflow_output == single.workflow_output
    return single.workflow_output


def test_extra_and_null_fields_and_metrics_that_are_no_number_are_left_out() -> None:
    metrics = {"a": 1, "b": 0.5, "c": None, "d": "high", "e": [1.0], "f": float("nan"), "g": True, "h": 10**400}
    output = {"reward": 1, "is_success": None, "metadata": None, "log_metrics": metrics, "images": []}
    assert end(output) == WorkflowOutput(reward=1.0, log_metrics={"a": 1.0, "b": 0.5, "g": 1.0})
    assert end({"reward": 0.5, "log_metrics": None}) == WorkflowOutput(reward=0.5)


def test_an_output_of_ours_goes_through_as_it_is() -> None:
    output = WorkflowOutput(reward=0.25, metadata={"k": 1})
    assert end(output) == output


@pytest.mark.parametrize("reward", [None, "much", float("nan"), float("inf"), 1e39, -1e39, [1.0]])
def test_the_reward_is_one_finite_number(reward: Any) -> None:
    with pytest.raises(ValidationError, match="reward"):
        end({"reward": reward})
    with pytest.raises(ValidationError, match="reward"):
        end({})
