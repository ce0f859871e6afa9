from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gateway.config.route import RouteSettings
from gateway.rollout.submission import MAX_TASK, refuses, workflow_outputs
from reward_hooks.contract import GroupScore, Reward
from swarm.client.wire import end_key
from swarm.measures import MAX_LOGGED, MAX_NAME, SHUFFLED, components_of
from swarm.protocol import MAX_REASON
from swarm.types import Notes, Task, WorkflowOutput

TASK = Task(task_id="t", main_query="why?", metadata={"answer": "42"})
KEPT = {"main_query": "why?", "metadata": {"answer": "42"}}


def score(*values: float) -> GroupScore:
    return GroupScore(
        rewards=[Reward(value=value, components={"n": value}, reason=f"it is {value}") for value in values]
    )


def outputs(
    given: GroupScore,
    credit: Mapping[int, float] | None = None,
    *,
    notes: Notes | None = None,
    task: Task = TASK,
    delivered: Sequence[bool] | None = None,
    shuffled: bool = False,
) -> list[WorkflowOutput]:
    delivered = delivered or [False] * len(given.rewards)
    refused = [False] * len(delivered)
    return workflow_outputs(given, credit or {}, notes or Notes(), task, delivered, refused, shuffled=shuffled)


def components(output: WorkflowOutput) -> dict[str, float]:
    return components_of(output.log_metrics)


def ranks(told: Sequence[WorkflowOutput]) -> list[int | None]:
    return [one.notes and one.notes.rank for one in told]


def test_each_answer_has_its_rank_components_and_reason() -> None:
    told = outputs(
        score(0.5, 2.0, 0.5, -1.0), notes=Notes(group_id="g", hook="mine"), delivered=[False, True, False, False]
    )
    assert [one.reward for one in told] == [0.5, 2.0, 0.5, -1.0]
    assert [one.notes for one in told] == [
        Notes(group_id="g", hook="mine", rank=rank, reason=f"it is {value}", delivered=rank == 1, task=task)
        for rank, value, task in ((2, 0.5, KEPT), (1, 2.0, None), (2, 0.5, None), (4, -1.0, None))
    ]
    assert [components(one) for one in told] == [{"n": 0.5}, {"n": 2.0}, {"n": 0.5}, {"n": -1.0}]


def test_what_no_advantage_can_come_of_is_a_tie() -> None:
    assert ranks(outputs(score(1.0, 1.0 + 1e-12))) == [1, 1]


def test_what_the_session_earned_is_beside_the_reward_and_of_one_answer_alone() -> None:
    first, second = outputs(score(1.0, 1.5), {0: 1.0})
    assert (first.reward, first.credit, *ranks([first])) == (1.0, 1.0, 2)
    assert components(first) == {"n": 1.0, "session": 1.0}
    assert (second.reward, second.credit, *ranks([second])) == (1.5, 0.0, 1)
    assert components(second) == {"n": 1.5}


def test_a_control_permutes_rewards_and_leaves_the_order_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(values: list[Any], _: int) -> list[Any]:
        return values[::-1]

    monkeypatch.setattr(random, "sample", backwards)
    told = outputs(score(1.0, 2.0, 3.0), {2: 0.5}, shuffled=True)
    assert [one.reward for one in told] == [3.0, 2.0, 1.0]
    assert [one.credit for one in told] == [0.5, 0.0, 0.0]
    assert ranks(told) == [3, 2, 1]
    assert [(one.log_metrics["n"], one.log_metrics[SHUFFLED]) for one in told] == [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]


def test_what_a_hook_says_at_length_is_cut() -> None:
    loud_components = {f"{number} {'x' * 1000}": 1.0 for number in range(1000)}
    loud = GroupScore(rewards=[Reward(value=1.0, components=loud_components, reason="y" * 100_000)])
    [told] = outputs(loud)
    assert told.notes is not None and told.notes.reason == "y" * MAX_REASON
    assert len(components(told)) == MAX_LOGGED
    assert all(len(name) == MAX_NAME for name in components(told))


def test_a_reward_without_a_reason_has_none() -> None:
    [told] = outputs(GroupScore(rewards=[Reward(value=1.0)]))
    assert told.notes == Notes(rank=1, delivered=False, task=KEPT)


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


@pytest.mark.parametrize(
    "metadata",
    [
        {"answer": "x" * MAX_TASK},
        {"answer": {1, 2}},
        {"answer": float("nan")},
        {"answer": "\ud800"},
        nested(400),
        nested(100_000),
    ],
    ids=["long", "odd", "NaN", "surrogate", "deep", "too deep for Python"],
)
def test_a_task_that_is_long_or_no_json_is_not_kept(metadata: dict[str, Any]) -> None:
    told = outputs(score(1.0, 2.0), task=TASK.model_copy(update={"metadata": metadata}))
    assert all(one.notes is not None and one.notes.task is None for one in told)
    end_key("t", {str(place): one for place, one in enumerate(told)})


def test_what_a_hook_says_can_be_sent() -> None:
    odd = GroupScore(rewards=[Reward(value=1.0, components={"\ud800": 1.0}, reason="half \ud800" * MAX_REASON)])
    [told] = outputs(odd)
    assert told.notes is not None
    assert told.notes.reason.startswith("half \\ud800half") and len(told.notes.reason) == MAX_REASON
    assert components(told) == {"\\ud800": 1.0}
    end_key("t", {"e": told})


@pytest.mark.parametrize(
    ("message", "finish", "refused"),
    [
        ({"content": "I'm sorry, but I can't help with that."}, "stop", True),
        ({"content": "\n Sorry, I cannot do this."}, "stop", True),
        ({"content": "I apologize, but as a model"}, "stop", True),
        ({"content": "Unfortunately, I can\u2019t assist you."}, "stop", True),
        ({"content": "I am unable to open it."}, "stop", True),
        ({"content": "As an AI language model, I have no taste."}, "stop", True),
        ({"content": None, "refusal": "no"}, "stop", True),
        ({"content": ""}, "content_filter", True),
        ({"content": "I am sorry about that. Here is the file:"}, "stop", False),
        ({"content": "I can help with that."}, "stop", False),
        ({"content": "Say: I cannot help you."}, "stop", False),
        ({"content": "I can't help with that.", "tool_calls": [{"id": "1"}]}, "tool_calls", False),
        ({"content": None}, "stop", False),
        ({"content": [{"type": "text", "text": "I won't provide it."}]}, "stop", True),
    ],
)
def test_an_answer_refuses_by_its_field_its_finish_or_its_first_words(
    message: dict[str, Any], finish: str, refused: bool
) -> None:
    openings = RouteSettings.model_fields["refusal_openings"].get_default(call_default_factory=True, validated_data={})
    assert refuses(message, finish, openings) is refused
    assert refuses({"content": message.get("content")}, "stop", []) is False


def test_a_component_of_a_hook_does_not_say_whether_an_answer_refuses() -> None:
    named = GroupScore(rewards=[Reward(value=1.0, components={"refused": 1.0, "n": 1.0})])
    [output] = outputs(named)
    assert output.log_metrics == {"n": 1.0, "refused": 0.0}
