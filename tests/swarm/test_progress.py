"""The words for a step and for a batch that fills."""

from __future__ import annotations

import pytest

from swarm.progress import DOING, batch_progress, reward, share, step_line
from swarm.states import EngineState
from swarm.status import PoolInformation
from swarm.types import StepResult

POOL = PoolInformation(
    batch_size=4, num_repeat=8, completed_tasks=1, completed_episodes=11, tasks={"whole": 8, "one": 1, "two": 2}
)


def test_a_step_line_leaves_out_what_the_engine_did_not_report() -> None:
    step = StepResult(step=1, batch_id="b", metrics={}, seconds=2.0)
    assert step_line(step) == "step    1  2.0 s"
    metrics = {
        "swarm/reward_mean": 0.00625,
        "swarm/reward_std": 0.25,
        "swarm/tasks": 4.0,
        "swarm/tasks_with_signal": 3.0,
    }
    told = step_line(step.model_copy(update={"metrics": metrics}))
    assert told == "step    1  reward 0.006 ±0.250  3 of 4 groups differ  2.0 s"
    none = step_line(step.model_copy(update={"metrics": metrics | {"swarm/tasks_with_signal": 0.0}}))
    assert "0 of 4 groups differ: nothing to learn" in none


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.00625, "0.006"), (-0.5, "-0.500"), (0, "0.000"), (0.0001, "0.0001"), (1.5e308, "1.5e+308"), (-1e-17, "0.000")],
)
def test_a_small_reward_is_not_said_to_be_none(value: float, told: str) -> None:
    assert reward(value) == told
    metrics = {"swarm/reward_mean": value, "swarm/reward_std": abs(value)}
    step = StepResult(step=1, batch_id="b", metrics=metrics, seconds=2.0)
    assert step_line(step) == f"step    1  reward {told} ±{told.removeprefix('-')}  2.0 s"


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.0, "0%"), (0.004, "<1%"), (0.006, "1%"), (0.4, "40%"), (0.994, "99%"), (255 / 256, ">99%"), (1.0, "100%")],
)
def test_none_and_all_are_said_of_none_and_all_alone(value: float, told: str) -> None:
    assert share(value) == told
    step = StepResult(step=1, batch_id="b", metrics={"swarm/success_rate": value}, seconds=2.0)
    assert step_line(step) == f"step    1  success {told}  2.0 s"


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({}, (1, 4, "1 of 4 tasks, 3 requests to go")),
        ({"whole_groups": False}, (11, 32, "11 of 32 episodes, 3 requests to go")),
        ({"whole_groups": False, "by_agreement": True}, (0, 0, "3 tasks wait for the clients' agreement")),
    ],
)
def test_a_batch_is_what_the_job_collects_by(method: dict[str, bool], expected: tuple[int, int, str]) -> None:
    assert batch_progress(POOL.model_copy(update=method)) == expected


def test_one_request_to_go_is_one_and_a_full_batch_wants_none() -> None:
    words = [batch_progress(POOL.model_copy(update={"completed_tasks": done}))[2] for done in (3, 5)]
    assert words == ["3 of 4 tasks, 1 request to go", "5 of 4 tasks, 0 requests to go"]


def test_every_state_has_words_without_the_names_on_the_wire() -> None:
    assert set(DOING) == set(EngineState)
    assert not [words for words in DOING.values() if "ROLLING" in words or "ENGINE" in words]
