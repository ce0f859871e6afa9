"""Tasks without an id and rewards that are no numbers cannot be built."""

import math

import pytest
from pydantic import ValidationError

from swarm.types import Task, WorkflowOutput


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_is_finite(reward: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        WorkflowOutput(reward=reward)


def test_an_empty_task_id_is_refused() -> None:
    with pytest.raises(ValidationError, match="task_id"):
        Task(task_id="")
