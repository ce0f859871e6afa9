"""AgentJet's tasks and answers: a task without an id is named by its content; a prompt that was too long is told."""

from __future__ import annotations

from typing import Any

import pytest

from swarm import types
from swarm.agentjet.schema import Task, WorkflowOutput, is_token_overflow_message, task_id_of
from swarm.errors import ConfigError


def test_equal_tasks_without_an_id_are_one_group() -> None:
    same = [Task(main_query="q", metadata={"answer": 4}) for _ in range(2)]
    assert task_id_of(same[0]) == task_id_of(same[1])
    assert task_id_of(same[0]) != task_id_of(Task(main_query="q", metadata={"answer": 5}))
    seeds = [Task.model_validate({"main_query": "", "seed": seed}) for seed in (0, 1, False)]
    assert len({task_id_of(task) for task in seeds}) == 3
    assert task_id_of(Task(task_id="t", main_query="q")) == "t" == task_id_of(types.Task(task_id="t"))
    with pytest.raises(ConfigError, match="the task is empty"):
        task_id_of(Task())


def test_tasks_and_outputs_may_be_changed() -> None:
    task, output = Task(main_query="q"), WorkflowOutput(reward=1.0)
    task.metadata["seen"] = output.metadata["task_id"] = "t"
    assert (task.metadata, output.metadata) == ({"seen": "t"}, {"task_id": "t"})
    assert Task().metadata == {}


@pytest.mark.parametrize(
    ("content", "too_long"),
    [
        ("AgentJet: Exceeded max model context length. token_overflow(3000 > 2000)", True),
        (b"Exceeded max model context length. token_overflow", True),
        ({"role": "assistant", "content": "Exceeded max model context length. token_overflow(1)"}, True),
        ("token_overflow", False),
        ({"content": None}, False),
        (None, False),
    ],
)
def test_an_answer_that_says_that_the_prompt_was_too_long(content: Any, too_long: bool) -> None:
    assert is_token_overflow_message(content) is too_long
