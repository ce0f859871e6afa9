"""Metrics of episodes: means over those that have a value, and no more names than there may be."""

import math
import sys

import pytest

from swarm.measures import MAX_LOGGED, MetricSums
from swarm.tokens import TokenCounts, TrainBatch, TrainGroup, Trajectory, batch_metrics
from swarm.types import StepResult
from tests.token_data import timeline, trajectory


def episode(reward: float, success: bool | None, calls: int, **logged: float) -> Trajectory:
    line = timeline([1], [2, 3], response_mask=[1, 0], num_calls=calls)
    return trajectory(line, reward=reward, num_calls=calls, is_success=success, log_metrics=logged)


def test_a_batch_is_measured_over_the_episodes_that_say_something() -> None:
    members = [episode(1.0, True, 3, tools=2.0), episode(0.0, None, 1, tools=math.inf, late=7.0)]
    batch = TrainBatch(batch_id="b", groups=[TrainGroup(task_id="t", trajectories=members)])
    measured = batch_metrics(batch, 1)
    told = {
        "swarm/reward_mean": 0.5,
        "swarm/reward_std": 0.5,
        "swarm/success_rate": 1.0,
        "swarm/calls_mean": 2.0,
        "swarm/response_tokens_mean": 1.0,
        "swarm/log/tools": 2.0,
        "swarm/log/late": 7.0,
        "swarm/episodes": 2.0,
        "swarm/tasks": 1.0,
        "swarm/tasks_with_signal": 1.0,
    }
    assert {name: measured[name] for name in told} == told


def test_a_task_of_equal_rewards_has_a_signal_where_an_episode_has_a_credit() -> None:
    def group(*credits: float) -> TrainGroup:
        line = timeline([1], [2])
        return TrainGroup(task_id="t", trajectories=[trajectory(line, credit=credit) for credit in credits])

    batch = TrainBatch(batch_id="b", groups=[group(0.0, 0.0), group(0.0, -0.5)])
    assert batch_metrics(batch, 1)["swarm/tasks_with_signal"] == 1.0


def test_merging_and_the_age_of_tokens_are_measured_over_the_batch() -> None:
    mixed = timeline([1], [2, 3, 4], response_mask=[1, 0, 1], version=1, newest=4, versions=[(0, 1), (1, 4)])
    tokens = TokenCounts(calls=3, timelines=1, trained=2, masked=1, prompts=1, unmerged=9, kept=2, lost=1)
    other = TokenCounts(calls=1, timelines=1, trained=1, prompts=1, unmerged=2, kept=1)
    members = [trajectory(mixed, tokens=tokens), trajectory(timeline([1], [2], 3), tokens=other)]
    batch = TrainBatch(batch_id="b", groups=[TrainGroup(task_id="t", trajectories=members)])
    measured = batch_metrics(batch, 5)
    told = {
        "swarm/calls": 4.0,
        "swarm/timelines": 2.0,
        "swarm/unmerged_tokens": 11.0,
        "swarm/merged_tokens": 6.0,
        "swarm/lost_history": 0.25,
        "swarm/staleness_mean": pytest.approx((3 + 0 + 1) / 3),
        "swarm/staleness_max": 3.0,
    }
    assert {name: measured[name] for name in told} == told


def test_a_status_stays_readable_whatever_was_logged() -> None:
    members = [episode(1.0, None, 1, worst=sys.float_info.max, length=2.0) for _ in range(2)]
    batch = TrainBatch(batch_id="b", groups=[TrainGroup(task_id="t", trajectories=members)])
    step = StepResult(step=1, batch_id="b", metrics=batch_metrics(batch, 1), seconds=1.0)
    assert StepResult.model_validate_json(step.model_dump_json()) == step
    assert step.metrics["swarm/log/length"] == 2.0 and "swarm/log/worst" not in step.metrics


def test_sums_are_taken_up_again_and_names_are_bounded() -> None:
    sums = MetricSums()
    sums.add(1.0, None, 1, 1, {f"n{number}": 1.0 for number in range(MAX_LOGGED + 5)})
    again = MetricSums(sums.dump())
    again.add(0.0, None, 1, 1, {"late": 1.0, "n0": 3.0})
    means = again.means("x/")
    assert (means["x/reward_mean"], means["x/reward_std"], means["x/log/n0"], again.episodes) == (0.5, 0.5, 2.0, 2)
    assert "x/log/late" not in means and sum(name.startswith("x/log/") for name in means) == MAX_LOGGED


def test_an_evaluation_is_worked_out_once_until_another_episode_comes() -> None:
    sums = MetricSums()
    sums.add(1.0, None, 1, 1, {})
    first = sums.evaluation(3)
    assert sums.evaluation(3) is first
    sums.add(0.0, None, 1, 1, {})
    assert (sums.evaluation(3).episodes, sums.evaluation(3).metrics["eval/reward_mean"]) == (2, 0.5)
    assert sums.evaluation(4).step == 4 and (first.step, first.episodes) == (3, 1)


@pytest.mark.parametrize(
    ("response", "mask", "share"),
    [
        ([1, 2, 3], [1, 1, 1], 0.0),
        ([1, 2, 3, 4, 5], [1, 1, 1, 1, 1], 0.0),
        # six sequences of four tokens, of which two come twice
        ([1, 2, 3, 4, 1, 2, 3, 4, 1], [1] * 9, 1 / 3),
        # what a tool said is not the model's
        ([1, 2, 3, 4, 9, 9, 9, 9, 9], [1, 1, 1, 1, 0, 0, 0, 0, 0], 0.0),
        # only the end counts
        ([7] * 300 + list(range(256)), [1] * 556, 0.0),
        ([7] * 300, [1] * 300, 252 / 253),
    ],
)
def test_repetition_is_of_what_an_episode_ends_with(response: list[int], mask: list[int], share: float) -> None:
    of_two = [trajectory(timeline([1], response, response_mask=mask)), trajectory(timeline([1], [1, 2, 3, 4]))]
    batch = TrainBatch(batch_id="b", groups=[TrainGroup(task_id="t", trajectories=of_two)])
    assert batch_metrics(batch, 1)["swarm/repetition"] == pytest.approx(share / 2)
