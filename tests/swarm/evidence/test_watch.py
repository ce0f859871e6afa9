"""The alarms of a training run: healthy curves raise none, each collapse raises its own, what is not measured none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from swarm.evidence.alarms import ALARMS, Alarm, WatchRules
from swarm.evidence.watch import watched
from swarm.measures import RESPONSE_TOKENS
from swarm.types import EvalResult, StepResult

RULES = WatchRules()
STEPS, GROUPS, ANSWERS = 150, 4, 32
SPREAD = 0.25
#: What is true at a place in the run, from 0 to 1.
Truth = Callable[[float], dict[str, Any]]


def truth(**changes: float | Callable[[float], float]) -> Truth:
    """Flat, unless ``changes`` say how something changes."""
    curves: dict[str, Any] = {"reward": 0.4, "entropy": 1.2, "tokens": 40.0, "repetition": 0.05, "substance": 0.9}
    curves["refused"] = 0.05
    curves |= changes
    return lambda at: {name: curve(at) if callable(curve) else curve for name, curve in curves.items()}


def ramp(before: float, after: float, begins: float = 0.3) -> Callable[[float], float]:
    return lambda at: before + (after - before) * max(0.0, at - begins) / (1 - begins)


def run(of: Truth, seed: int, steps: int = STEPS) -> list[StepResult]:
    """What ``steps`` steps of four groups of eight answers measure, each with other prompts."""
    noise, declines, done = random.Random(seed), random.Random(seed), list[StepResult]()
    for number in range(1, steps + 1):
        true = of(number / steps)
        prompts = sum(noise.gauss(0, SPREAD * 0.6) for _ in range(GROUPS)) / GROUPS
        metrics = {
            "swarm/reward_mean": true["reward"] + prompts + noise.gauss(0, SPREAD * 0.8 / math.sqrt(ANSWERS)),
            "swarm/reward_std": SPREAD,
            "swarm/tasks": float(GROUPS),
            "swarm/tasks_with_signal": float(sum(noise.random() < 0.9 for _ in range(GROUPS))),
            "swarm/response_tokens_mean": true["tokens"] * math.exp(noise.gauss(0, 0.15)),
            "swarm/repetition": min(1.0, max(0.0, true["repetition"] + noise.gauss(0, 0.04))),
            "swarm/log/substance": sum(noise.random() < true["substance"] for _ in range(ANSWERS)) / ANSWERS,
            "swarm/log/faults": noise.random() * (1 - number / steps),
            "swarm/log/words": true["tokens"] * 0.7,
            "actor/entropy": true["entropy"] * math.exp(noise.gauss(0, 0.08)),
            "rollout_corr/rollout_is_mean": 1.0 + noise.gauss(0, 0.01),
            "rollout_corr/rollout_is_eff_sample_size": 0.98,
            "rollout_corr/kl": noise.gauss(0, 0.005),
            "rollout_corr/chi2_token": 0.01,
            "swarm/log/refused": sum(declines.random() < true["refused"] for _ in range(ANSWERS)) / ANSWERS,
        }
        done.append(StepResult(step=number, batch_id=str(number), metrics=metrics, seconds=1.0))
    return done


def raised(steps: list[StepResult], every: int = 5) -> dict[str, Alarm]:
    """The alarms that a server that looks after each fifth step sees first."""
    seen: dict[str, Alarm] = {}
    for end in range(every, len(steps) + 1, every):
        for alarm in watched(steps[:end], [], RULES):
            seen.setdefault(alarm.kind, alarm)
    return seen


HEALTHY = {
    "control": truth(),
    "saturates": truth(reward=lambda at: 0.2 + 0.5 * (1 - math.exp(-8 * at)), tokens=ramp(40, 50)),
    # Cui et al.: three quarters of the entropy are gone after the first twelfth
    "spends entropy": truth(
        reward=lambda at: 0.2 + 0.5 * (1 - math.exp(-8 * at)), entropy=lambda at: 0.2 + math.exp(-16 * at)
    ),
    "becomes concise": truth(reward=lambda at: 0.2 + 0.3 * at, tokens=lambda at: 60 - 35 * at, entropy=ramp(1.2, 0.8)),
    "refuses less": truth(reward=lambda at: 0.2 + 0.3 * at, refused=ramp(0.6, 0.05)),
}
COLLAPSES = {
    "entropy": truth(entropy=lambda at: 1.2 * math.exp(-4 * max(0.0, at - 0.3))),
    "length": truth(reward=ramp(0.4, 0.5), tokens=ramp(40, 160)),
    "repetition": truth(repetition=ramp(0.05, 0.7)),
    "refusals": truth(refused=ramp(0.05, 0.6)),
    "components": truth(reward=lambda at: 0.4 + 0.3 * at, substance=lambda at: 1.0 - 0.3 * at),
    "reward": truth(reward=ramp(0.5, 0.1)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_raise_no_alarm(name: str) -> None:
    assert [raised(run(HEALTHY[name], seed)) for seed in range(6)] == [{}] * 6


@pytest.mark.parametrize("name", COLLAPSES)
def test_each_collapse_raises_its_own_alarm_and_no_other(name: str) -> None:
    for seed in range(6):
        steps = run(COLLAPSES[name], seed)
        assert set(raised(steps)) == {name}
        [alarm] = watched(steps, [], RULES)
        # since then it has been so, and just before it was not
        assert [one.kind for one in watched(steps[: alarm.since], [], RULES)] == [name]
        assert watched(steps[: alarm.since - 1], [], RULES) == []
        assert alarm.action == "warn" and alarm.sentence.startswith(f"{name}, since step {alarm.since}: ")


def test_a_jump_long_ago_hides_no_collapse() -> None:
    """Neither the entropy that a run spends in its first steps, nor a step in which all went wrong."""
    steps = run(truth(entropy=ramp(0.5, 0.02, begins=0.6), tokens=ramp(40, 160, begins=0.6)), seed=1)
    for at, name, value in ((0, "actor/entropy", 3.0), (1, "actor/entropy", 1.2), (20, RESPONSE_TOKENS, 4000.0)):
        steps[at].metrics[name] = value
    assert {"entropy", "length"} <= set(raised(steps))


def test_the_sentences_have_the_figures() -> None:
    [fell] = watched(run(COLLAPSES["components"], 1), [], RULES)
    assert fell.text.startswith("substance fell from ") and "while the mean reward rose from 0." in fell.text
    [spent] = watched(run(COLLAPSES["entropy"], 1), [], RULES)
    assert spent.text.startswith("the entropy fell from 0.") and "the mean reward is no higher (then 0." in spent.text


@given(
    name=st.sampled_from([*HEALTHY, *COLLAPSES]),
    seed=st.integers(0, 9),
    gone=st.sets(st.sampled_from([*run(truth(), 0, 1)[0].metrics])),
)
def test_what_is_not_measured_raises_no_alarm_and_hides_no_other(name: str, seed: int, gone: set[str]) -> None:
    steps = run((HEALTHY | COLLAPSES)[name], seed, 60)
    fewer = [
        step.model_copy(update={"metrics": {key: value for key, value in step.metrics.items() if key not in gone}})
        for step in steps
    ]
    whole, left = ({alarm.kind: alarm for alarm in watched(of, [], RULES)} for of in (steps, fewer))
    assert left.items() <= whole.items()


@given(seed=st.integers(0, 99), name=st.sampled_from([*COLLAPSES]), off=st.sets(st.sampled_from(ALARMS)))
def test_what_is_off_is_left_out_and_the_rest_is_as_it_was(seed: int, name: str, off: set[str]) -> None:
    steps = run(COLLAPSES[name], seed, 60)
    rules = WatchRules.model_validate({one: {"action": "off"} for one in off})
    assert watched(steps, [], rules) == [alarm for alarm in watched(steps, [], RULES) if alarm.kind not in off]


def step(**metrics: float) -> StepResult:
    return StepResult(step=1, batch_id="1", metrics={k.replace("__", "/"): v for k, v in metrics.items()}, seconds=1.0)


@pytest.mark.parametrize(
    ("name", "metric", "healthy", "beyond"),
    [
        ("weights", "rollout_corr__rollout_is_mean", (0.5, 1.0, 2.0), (0.49, 2.01)),
        ("sample_size", "rollout_corr__rollout_is_eff_sample_size", (0.3, 1.0), (0.29,)),
        ("sampler_kl", "rollout_corr__kl", (-0.1, 0.0, 0.1), (-0.11, 0.11)),
        ("chi2", "rollout_corr__chi2_token", (0.0, 1.0), (1.01,)),
        ("base_kl", "actor__kl_loss", (0.0, 0.5), (0.51,)),
    ],
)
def test_a_step_beyond_a_limit_is_an_alarm_at_once(
    name: str, metric: str, healthy: tuple[float, ...], beyond: tuple[float, ...]
) -> None:
    for value in healthy:
        assert watched([step(**{metric: value})], [], RULES) == []
    for value in beyond:
        [alarm] = watched([step(**{metric: value})], [], RULES)
        assert (alarm.kind, alarm.since) == (name, 1)
        assert watched([step(**{metric: value}), step(**{metric: healthy[-1]})], [], RULES) == []


@pytest.mark.parametrize(
    ("counts", "alarms"),
    [((0,), []), ((0, 0), ["signal"]), ((0, 1), []), ((4, 0, 0), ["signal"]), ((0, 0, 4), []), ((), [])],
)
def test_two_steps_without_a_signal(counts: tuple[int, ...], alarms: list[str]) -> None:
    silent = [step(swarm__tasks=4, swarm__tasks_with_signal=count) for count in counts]
    steps = [each.model_copy(update={"step": number}) for number, each in enumerate(silent, 1)]
    found = watched(steps, [], RULES)
    assert [alarm.kind for alarm in found] == alarms
    assert all("so nothing was learned: make the reward finer" in alarm.text for alarm in found)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_what_chance_makes_of_a_few_steps_is_no_alarm(noise: float) -> None:
    refused = [level + noise * (number % 2) for level in (0.0, 0.15) for number in range(RULES.window)]
    steps = [step(swarm__log__refused=share) for share in refused]
    found = watched([one.model_copy(update={"step": number}) for number, one in enumerate(steps, 1)], [], RULES)
    assert [alarm.kind for alarm in found] == ([] if noise else ["refusals"])


def test_few_groups_with_a_signal_are_little() -> None:
    rare = [step(swarm__tasks=40, swarm__tasks_with_signal=count) for count in (5, 2)]
    [alarm] = watched([one.model_copy(update={"step": number}) for number, one in enumerate(rare, 1)], [], RULES)
    assert alarm.text.startswith("in 2 steps in a row the rewards differ in 7 of 80 groups, so little was learned")


def evaluated(*rewards: float, episodes: int = 200, deviation: float = 0.25) -> list[EvalResult]:
    return [
        EvalResult(
            step=5 * number, episodes=episodes, metrics={"eval/reward_mean": reward, "eval/reward_std": deviation}
        )
        for number, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("evaluations", "since"),
    [
        (evaluated(0.4, 0.6, 0.45, 0.45), 15),
        (evaluated(0.4, 0.6, 0.6, 0.45, 0.4, 0.4), 20),
        # before a tenth is lost, if there are enough episodes to tell
        (evaluated(0.4, 0.6, 0.56, 0.56, episodes=2000), 15),
        (evaluated(0.4, 0.6, 0.56, 0.56), None),
        (evaluated(0.4, *[0.6] * 4, *[0.56] * 8, episodes=800), 30),
        # one alone is no alarm, nor is a twentieth less, nor what chance does to few episodes
        (evaluated(0.4, 0.6, 0.45), None),
        (evaluated(0.4, 0.6, 0.45, 0.6), None),
        (evaluated(0.4, 0.6, 0.575, 0.575, episodes=5000), None),
        (evaluated(0.4, 0.6, 0.45, 0.45, episodes=12), None),
        (evaluated(-0.2, -0.6, -0.6), 10),
        ([], None),
    ],
)
def test_held_out_prompts(evaluations: list[EvalResult], since: int | None) -> None:
    now = [step(swarm__reward_mean=0.8)]
    found = watched(now, evaluations, RULES)
    assert [(alarm.kind, alarm.since) for alarm in found] == ([("held_out", since)] if since is not None else [])
    assert all("(in the last training step: 0.8)" in alarm.text for alarm in found)
    for evaluation in evaluations:
        del evaluation.metrics["eval/reward_std"]
    assert watched(now, evaluations, RULES) == []


def test_the_best_of_many_evaluations_is_one_that_chance_was_kind_to() -> None:
    noise, now = random.Random(1), [step(swarm__reward_mean=0.5)]
    misled = 0
    for _ in range(40):
        rewards = [noise.gauss(0.5, 0.5 / math.sqrt(64)) for _ in range(150)]
        done = evaluated(*rewards, episodes=64, deviation=0.5)
        misled += any(watched(now, done[:end], RULES) for end in range(10, len(done), 10))
    assert misled / 40 <= 0.05


def test_a_summed_entropy_falls_with_the_length_alone() -> None:
    steps = run(truth(tokens=ramp(40, 15), entropy=ramp(48, 18)), 3)
    for one in steps:
        one.metrics.update({"swarm/episodes": 32.0, "swarm/rows": 32.0})
    assert [alarm.kind for alarm in watched(steps, [], RULES)] == ["entropy"]
    assert watched(steps, [], RULES, summed_over=1000) == []


def test_a_summed_kl_loss_is_told_of_a_token() -> None:
    # 12 sampled tokens in a row: 2 rows of an episode
    counts = {"swarm__response_tokens_mean": 24.0, "swarm__episodes": 4.0, "swarm__rows": 8.0}
    drifted = step(actor__kl_loss=0.6 * 12 / 1000, **counts)
    assert watched([drifted], [], RULES) == []
    [alarm] = watched([drifted], [], RULES, summed_over=1000)
    assert alarm.kind == "base_kl" and "is 0.6, and its limit is 0.5" in alarm.text
    assert watched([step(actor__kl_loss=0.4 * 12 / 1000, **counts)], [], RULES, summed_over=1000) == []
    # rows that fill up the last mini-batch are among those that verl divides by
    [alarm] = watched(
        [step(actor__kl_loss=0.4 * 12 / 1000, swarm__padding_rows=4.0, **counts)], [], RULES, summed_over=1000
    )
    assert "is 0.6, and its limit is 0.5" in alarm.text
    assert watched([step(actor__kl_loss=9.0)], [], RULES, summed_over=1000) == [], "nobody counted its tokens"


def test_rules_say_only_what_differs() -> None:
    rules = WatchRules.model_validate({"entropy": {"action": "pause"}, "chi2": {"limit": 2}})
    assert (rules.entropy.limit, rules.entropy.action) == (RULES.entropy.limit, "pause")
    assert (rules.chi2.limit, rules.chi2.action) == (2, "warn")
    assert all(rules.of(name).action for name in ALARMS)
    with pytest.raises(ValidationError, match="entropie"):
        WatchRules.model_validate({"entropie": {"action": "pause"}})


def test_rewards_without_squares_are_compared() -> None:
    steps = [step(swarm__reward_mean=1e200 * (-1) ** number) for number in range(100)]
    numbered = [each.model_copy(update={"step": number}) for number, each in enumerate(steps, 1)]
    assert watched(numbered, [], RULES) == []


def test_steps_of_weights_that_are_lost_are_compared_with_none() -> None:
    """The engine went back to its checkpoint: the reward rises once more from where it was then."""
    steps = run(truth(reward=ramp(0.0, 1.0, begins=0.3)), seed=3, steps=100)
    assert not raised(steps)
    assert not raised(steps[:60] + steps[30:])
