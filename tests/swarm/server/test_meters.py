"""Counters: what is counted, and that there is a bound on how many there are."""

from __future__ import annotations

from swarm.server.journal.rows import (
    CallRow,
    EndedHow,
    EndRow,
)
from swarm.server.monitor import GIVEN_UP, MAX_REASONS, Meters, Reasons
from swarm.states import EpisodeState
from swarm.tokens import ModelCall, Timeline, Trajectory


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def trajectory(mask: list[int]) -> Trajectory:
    timeline = Timeline(
        prompt_ids=[1],
        response_ids=[2] * len(mask),
        response_mask=mask,
        logprobs=[0.0] * len(mask),
        min_policy_version=0,
        max_policy_version=0,
        num_calls=1,
    )
    return Trajectory(episode_uuid="e", task_id="t", reward=1, timelines=[timeline], num_calls=1)


def call(tokens: int) -> ModelCall:
    return ModelCall(
        call_id="c",
        prompt_ids=[1],
        response_ids=[2] * tokens,
        logprobs=[0.0] * tokens,
        min_policy_version=0,
        max_policy_version=0,
        finish_reason="stop",
    )


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


def test_rates_are_means_over_the_window() -> None:
    clock = Clock()
    meters = Meters(clock)
    clock.now += 30
    for _ in range(10):
        meters.observe(ended(one=trajectory([1])))
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
