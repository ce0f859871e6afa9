"""The sentence that says whether a run learns: what each part of the evidence makes of it."""

from __future__ import annotations

import random
from statistics import fmean, pstdev

import pytest

from swarm.evidence.alarms import Alarm
from swarm.evidence.learning import HeldOut, finished, learning, learning_of, rewards_of
from swarm.types import EvalResult, StepResult


def run(rise: float, steps: int = 20, seed: int = 1) -> dict[int, float]:
    draw = random.Random(seed)
    return {step: 0.4 + rise * (step - 1) / max(1, steps - 1) + draw.gauss(0, 0.04) for step in range(1, steps + 1)}


def alarm(kind: str) -> Alarm:
    return Alarm(kind=kind, text="nothing was learned", since=3, action="warn")


RISES, FLAT, FALLS = run(0.3), run(0.0), run(-0.3)


def test_a_trend_that_is_proven_either_way_and_one_that_is_not() -> None:
    assert learning(RISES) == "learning: reward rose by 0.31 [0.21, 0.41] over 20 steps"
    assert learning(FALLS) == "no: reward fell by 0.29 [0.19, 0.39] over 20 steps"
    assert learning(FLAT) == "not proven: reward +0.01 [-0.09, 0.11] over 20 steps"
    assert learning({}) == ""
    assert learning({1: 0.5}) == "not proven: reward over 1 step tells nothing yet"
    assert learning({step: 1.0 for step in range(20)}).startswith("not proven: reward +0.000 [0.000, 0.000]")
    assert learning({step: 250.0 * reward for step, reward in RISES.items()}) == (
        "learning: reward rose by 77 [51, 103] over 20 steps"
    )
    assert learning({step: 1e307 * reward for step, reward in RISES.items()}) == (
        "learning: reward rose by 3.09e+306 [2.06e+306, 4.12e+306] over 20 steps"
    )


def test_a_run_of_shuffled_rewards_is_a_control() -> None:
    steps = [
        StepResult(step=step, batch_id=str(step), metrics={"swarm/reward_mean": reward}, seconds=1.0)
        for step, reward in RISES.items()
    ]
    assert learning_of(steps, []).startswith("learning: ")
    steps[-1].metrics["swarm/log/control.shuffled"] = 1.0
    assert learning_of(steps, []).startswith("control, whose rewards are shuffled, so that it gains by chance alone: ")


def test_held_out_tasks_decide_where_they_prove_something() -> None:
    rose = [HeldOut(0, 0.2, 0.3, 100), HeldOut(20, 0.5, 0.3, 100)]
    fell = [HeldOut(0, 0.5, 0.3, 100), HeldOut(20, 0.2, 0.3, 100)]
    assert learning(FALLS, rose).startswith(
        "learning: held-out reward rose by 0.30 [0.20, 0.40] from version 0 to 20; reward fell by 0.29 ["
    )
    assert learning(RISES, fell).startswith("no: held-out reward fell by 0.30 ")
    few = [HeldOut(0, 0.2, 0.3, 4), HeldOut(20, 0.5, 0.3, 4)]
    assert learning(RISES, few).startswith("learning: held-out reward +0.3 [-0.4, 1.0] from version 0 to 20; ")
    # each has the deviation of its own rewards, on whatever scale those of the training are
    apart = [HeldOut(0, 0.2, 0.0, 100), HeldOut(20, 0.5, 3.0, 100)]
    assert learning(RISES, apart).startswith("learning: held-out reward +0.3 [-0.4, 1.0] from version 0 to 20; ")
    # without a second one they prove nothing
    assert learning(RISES, rose[:1]) == learning(RISES)


def test_an_evaluation_that_goes_on_decides_nothing_yet() -> None:
    first, second, begun = HeldOut(0, 0.5, 0.5, 50), HeldOut(10, 0.56, 0.5, 50), HeldOut(20, 1.0, 0.0, 1)
    assert learning(FLAT, [first, begun]) == learning(FLAT, [first]) == learning(FLAT)
    assert learning(FLAT, [first, second, begun]) == learning(FLAT, [first, second])
    # some episodes may fail, and of one that another follows there come no more
    assert "from version 0 to 20" in learning(FLAT, [first, second, HeldOut(20, 0.56, 0.5, 45)])
    assert "from version 0 to 10" in learning(FLAT, [first, HeldOut(10, 0.56, 0.5, 30), begun])
    # a run that was begun again at its first step evaluates that again
    twice = first._replace(episodes=100)
    last = HeldOut(20, 0.56, 0.5, 50)
    assert finished([twice, second, begun]) == [twice, second]
    assert finished([twice, second, last]) == [twice, second, last]


def test_evaluations_of_a_few_episodes_tell_nothing() -> None:
    for count in (1, 2, 3):
        few = [HeldOut(0, 0.0, 0.0, count), HeldOut(20, 1.0, 0.0, count)]
        assert learning(FLAT, few).startswith("not proven: held-out reward from version 0 to 20 tells nothing yet; ")


def test_small_evaluations_mislead_as_seldom_as_large_ones() -> None:
    draw, misled = random.Random(5), 0
    for _ in range(400):
        drawn = [[draw.gauss(0.5, 0.3) for _ in range(5)] for _ in range(6)]
        seen = [HeldOut(version, fmean(each), pstdev(each), 5) for version, each in enumerate(drawn)]
        misled += any(
            not learning({1: 0.5}, seen[:count]).startswith("not proven") for count in range(2, len(seen) + 1)
        )
    assert misled / 400 < 0.05


def test_who_evaluates_again_and_again_is_not_misled_more_often() -> None:
    draw, misled = random.Random(5), 0
    for _ in range(300):
        seen = [HeldOut(version, draw.gauss(0.5, 0.03), 0.3, 100) for version in range(10)]
        misled += any(
            not learning({1: 0.5}, seen[:count]).startswith("not proven") for count in range(2, len(seen) + 1)
        )
    assert misled / 300 < 0.05


@pytest.mark.parametrize("kind", ["reward", "held_out", "entropy", "signal"])
def test_an_alarm_of_what_is_learned_says_no(kind: str) -> None:
    assert learning(RISES, alarms=[alarm(kind)]).startswith("no: nothing was learned; reward rose by 0.31 ")


def test_another_alarm_is_named() -> None:
    told = learning(RISES, alarms=[alarm("length"), alarm("chi2")])
    assert told == f"{learning(RISES)}; alarm: length, chi2"


def test_a_control_is_taken_away_step_by_step() -> None:
    both = {step: reward + 0.1 for step, reward in RISES.items()}
    assert learning(both, control=RISES) == (
        "not proven: reward +0.000 [0.000, 0.000] over 20 steps compared with the control"
    )
    other = run(0.0, seed=2)
    told = learning(RISES, control=other)
    assert told.startswith("learning: reward rose by 0.") and told.endswith("over 20 steps compared with the control")
    del other[20]
    assert "over 19 steps" in learning(RISES, control=other)
    assert learning(RISES, shuffled=True) == (
        "control, whose rewards are shuffled, so that it gains by chance alone: reward rose by 0.31 [0.21, 0.41] over "
        "20 steps"
    )


def test_it_is_read_from_steps_of_which_those_done_again_count_once() -> None:
    def step(number: int, reward: float | None) -> StepResult:
        metrics = {} if reward is None else {"swarm/reward_mean": reward, "swarm/reward_std": 0.3}
        return StepResult(step=number, batch_id=f"{number} {reward}", metrics=metrics, seconds=1.0)

    assert rewards_of([step(1, 0.1), step(2, 0.2), step(3, 0.3), step(2, 0.4), step(4, None)]) == {1: 0.1, 2: 0.4}
    evaluations = [
        EvalResult(step=n, episodes=100, metrics={"eval/reward_mean": n / 40, "eval/reward_std": 0.3}) for n in (0, 20)
    ]
    steps = [step(*each) for each in RISES.items()]
    assert learning_of(steps, evaluations) == learning(RISES, [HeldOut(0, 0.0, 0.3, 100), HeldOut(20, 0.5, 0.3, 100)])
    # without their deviation evaluations prove nothing
    evaluations = [EvalResult(step=n, episodes=100, metrics={"eval/reward_mean": n / 40}) for n in (0, 20)]
    assert learning_of(steps, evaluations) == learning(RISES)
    assert learning_of([], []) == ""
