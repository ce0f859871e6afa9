"""Counters: what is counted, and that there is a bound on how many there are."""

from __future__ import annotations

from msgspec.structs import replace

from swarm.measures import TASKS, TASKS_WITH_SIGNAL
from swarm.server.journal.rows import CallRow, EndedHow, EndRow, StateRow, StepRow
from swarm.server.monitor import GIVEN_UP, MAX_REASONS, Meters, Reasons
from swarm.states import EpisodeState
from swarm.tokens import ModelCall, TokenCounts, Trajectory
from swarm.types import StepResult
from tests.token_data import model_call, timeline, trajectory


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def sampled(mask: list[int]) -> Trajectory:
    return trajectory(timeline([1], [2] * len(mask), response_mask=mask))


def call(tokens: int) -> ModelCall:
    return model_call([1], [2] * tokens)


def ended(how: EndedHow = "ended", drop_reason: str = "", one: Trajectory | None = None) -> EndRow:
    return EndRow("e", "c", EpisodeState.DELETED, how, 0.0, drop_reason=drop_reason, trajectory=one)


def test_what_its_client_gave_up_is_counted_by_the_kind_of_its_reason() -> None:
    meters = Meters(Clock())
    for reason in (
        "",
        "reward_hook_failed: hook_timeout: hooks/one: it took longer than 30 s",
        "reward_hook_failed: hook_timeout: hooks/two: it took longer than 5 s",
        "reward_hook_failed: hook_raised: hooks/one: ValueError",
        "stragglers_cancelled",
        "sample_failed: the engine: gone",
        "I gave up: no time",
        *(word * 3 for word in "abcdefghijklmnopqrstuvwxyz"),
        "engine_unavailable",
    ):
        meters.observe(ended("aborted", reason))
    assert meters.outcomes == {"aborted": 34}
    assert meters.dropped.counts() == {
        "reward_hook_failed: hook_timeout": 2,
        "reward_hook_failed: hook_raised": 1,
        "stragglers_cancelled": 1,
        "sample_failed": 1,
        GIVEN_UP: 27,
        "engine_unavailable": 1,
    }


def test_what_was_given_up_before_it_sampled_is_not_dropped() -> None:
    meters = Meters(Clock())
    meters.observe(ended("aborted", "claim_withdrawn"))
    assert (meters.outcomes, meters.dropped.counts()) == ({"aborted": 1}, {})


def test_every_sampled_token_is_trained_or_dropped_for_a_reason() -> None:
    meters = Meters(Clock())
    one = replace(sampled([1, 0, 1]), tokens=TokenCounts(sampled=3, trained=2, repeated=1, masked=1))

    def end(name: str, how: EndedHow = "ended", drop_reason: str = "", waits: bool = False) -> None:
        kept = replace(one, episode_uuid=name) if waits else None
        meters.observe(CallRow(name, call(3)))
        meters.observe(
            EndRow(
                name, "c", EpisodeState.DELETED, how, 0.0, drop_reason=drop_reason, trajectory=kept, tokens=one.tokens
            )
        )

    end("a", waits=True)
    end("b", waits=True)
    end("c", drop_reason="quarantined: counts")
    end("d", "aborted", "reward_hook_failed: hook_timeout: late")
    end("e", "idle")
    meters.observe(StateRow(["b"], EpisodeState.DROPPED, reason="sampled by old weights", cause="stale", tokens=2))
    meters.observe(StateRow(["a"], EpisodeState.TRAINED, step=1, tokens=2))
    meters.observe(StepRow("r", StepResult(step=1, batch_id="1", metrics={}, seconds=1.0)))
    assert meters.tokens == {"sampled": 15, "trained": 2, "repeated": 2, "dropped": 11, "masked": 2}
    assert meters.dropped_tokens.counts() == {
        "quarantined: counts": 3,
        "reward_hook_failed: hook_timeout": 3,
        "idle": 3,
        "stale": 2,
    }


def test_steps_that_a_run_which_goes_back_records_again_are_counted_once() -> None:
    meters = Meters(Clock())
    metrics = {TASKS: 1.0, TASKS_WITH_SIGNAL: 1.0}
    steps = [
        StepRow("r", StepResult(step=n, batch_id=name, metrics=metrics, seconds=1.0)) for n, name in enumerate("ab", 1)
    ]
    for step in steps:
        meters.observe(StateRow([step.result.batch_id], EpisodeState.TRAINED, step=step.result.step, tokens=1))
        meters.observe(step)
    for step in steps:
        meters.observe(step)
    value = meters.registry.get_sample_value
    assert meters.tokens == {"trained": 2}
    assert value("swarm_trained_episodes_total") == 2
    assert value("swarm_step_seconds_count") == 2
    assert value("swarm_trained_groups_total", {"informative": "true"}) == 2


def test_rates_are_means_over_the_window() -> None:
    clock = Clock()
    meters = Meters(clock)
    clock.now += 30
    for _ in range(10):
        meters.observe(ended(one=sampled([1])))
        meters.observe(CallRow("e", call(6)))
    rates = meters.rates()
    assert (rates.window, rates.episodes_per_minute, rates.sampled_tokens_per_second) == (30.0, 20.0, 2.0)
    clock.now += 59
    assert meters.rates().episodes_per_minute == 10.0
    clock.now += 2
    assert meters.rates().episodes_per_minute == 0.0


def test_reasons_are_bounded() -> None:
    reasons = Reasons()
    for n in range(500):
        reasons.add("x" * (n + 1))
    counts = reasons.counts()
    assert len(counts) == MAX_REASONS + 1
    assert sum(counts.values()) == 500
    assert max(map(len, counts)) <= 100
