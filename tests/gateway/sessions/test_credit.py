"""What the outcome of a session is worth to each turn, against numbers made by hand, and what becomes of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.route import Baseline
from gateway.sessions.credit import Crediting, shares
from gateway.sessions.sessions import SessionLink, Sessions
from reward_hooks import Feedback, HookContext, Session
from tests.gateway.sessions.talk import Messages, ask, closed, route, say, user

TASK = ("route", "key", "task")


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions() as one:
        yield one


def rated(session: Session, context: HookContext) -> Any:
    """The outcome that the application told."""
    return session.feedback.rating if session.feedback else None


async def credits(*links: SessionLink) -> list[float]:
    async with asyncio.timeout(10):
        return [turn.credit for turn in await asyncio.gather(*map(closed, links))]


# ------------------------------------------------------------------ formulas


def test_the_share_of_a_turn_by_hand() -> None:
    assert shares([True, True, True], 0.5) == [0.25, 0.5, 1.0]
    # what the user went back beyond is no step of the way
    assert shares([True, False, True, False], 0.5) == [0.5, 0.0, 1.0, 0.0]
    assert shares([True, True], 1.0) == [1.0, 1.0] and shares([True, True], 0.0) == [0.0, 1.0]
    assert shares([], 0.5) == shares([False], 0.5)[1:] == []


@given(st.lists(st.booleans(), max_size=30), st.floats(0, 1))
def test_only_credited_turns_share_and_later_ones_more(credited: list[bool], discount: float) -> None:
    found = shares(credited, discount)
    assert [share == 0.0 for share, one in zip(found, credited, strict=True) if not one] == [True] * (
        len(credited) - sum(credited)
    )
    of_credited = [share for share, one in zip(found, credited, strict=True) if one]
    assert of_credited == [pytest.approx(discount**after) for after in reversed(range(len(of_credited)))]


def test_an_outcome_is_compared_with_those_before_it_by_hand() -> None:
    outcomes = Crediting()
    assert outcomes.advantage(TASK, 1.0, "std") == 1.0
    # mean 0.5, deviation sqrt(0.5)
    assert outcomes.advantage(TASK, 0.0, "std") == pytest.approx(-0.70710, abs=1e-4)
    # mean 2/3, deviation sqrt(1/3)
    assert outcomes.advantage(TASK, 1.0, "std") == pytest.approx(0.57735, abs=1e-4)
    assert outcomes.advantage(("route", "key", "another"), 1.0, "std") == 1.0
    assert Crediting().advantage(TASK, 0.3, "mean") == 0.3


@pytest.mark.parametrize("baseline", ["std", "mean"])
def test_equal_outcomes_credit_nobody(baseline: Baseline) -> None:
    outcomes = Crediting()
    # what rounding leaves would count as a credit, and its group as one that teaches
    assert [outcomes.advantage(TASK, 0.7, baseline) for _ in range(40)] == [0.7, *[0.0] * 39]


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=40))
def test_the_baselines(told: list[float]) -> None:
    plain, mean, std = Crediting(), Crediting(), Crediting()
    for number, outcome in enumerate(told):
        last = told[max(0, number - 31) : number + 1]
        above = outcome - fmean(last) if number else outcome
        deviation = stdev(last) + 1e-6 if number else 1.0
        assert plain.advantage(TASK, outcome, "none") == outcome
        assert mean.advantage(TASK, outcome, "mean") == pytest.approx(above, abs=1e-9)
        assert std.advantage(TASK, outcome, "std") == pytest.approx(above / deviation, abs=1e-6)


# ------------------------------------------------------------------ sessions


@pytest.mark.anyio
async def test_the_outcome_is_discounted_over_the_turns_that_led_to_it(sessions: Sessions) -> None:
    to, talk = route(rated, session_discount=0.5, session_weight=2.0), [user("repair the parser, please")]
    more = {"headers": {"x-swarm-session": "s"}}
    first = say(sessions, to, talk, "Which one do you mean?", **more)
    left = say(sessions, to, [*talk, user("the parser of dates")], "The tests fail.", **more)
    last = say(sessions, to, [*talk, user("the parser of times")], "The tests pass.", **more)
    ended = asyncio.create_task(credits(first, left, last))
    # what is credited waits for the end
    await asyncio.sleep(0)
    feedback = rating(1.0)
    assert sessions.end("s", "app", feedback) == 1
    assert await ended == [1.0, 0.0, 2.0]
    [report] = sessions.reports("s", "app")
    assert (report.ended, report.credited, report.credit_dropped) == ("endpoint", 2, 0)


@pytest.mark.anyio
async def test_what_the_hook_gives_each_turn_is_weighted_and_no_more(sessions: Sessions) -> None:
    to = route(lambda session, context: [0.25, -1.0], session_discount=0.5, session_weight=2.0)
    talk, more = [user("repair the parser, please")], {"headers": {"x-swarm-session": "s"}}
    turns = [
        say(sessions, to, talk, "Which one?", **more),
        say(sessions, to, [*talk, user("of dates")], "Done.", **more),
    ]
    sessions.end("s", "app")
    assert await credits(*turns) == [0.5, -2.0]


@pytest.mark.anyio
async def test_sessions_of_one_task_are_compared(sessions: Sessions) -> None:
    to = route(rated, session_baseline="mean")
    found: list[float] = []
    for name, task, outcome in [("a", "", 1.0), ("b", "", 0.0), ("c", "another", 0.5), ("d", "another", -0.5)]:
        link = say(sessions, to, [user("repair it")], "Done.", headers={"x-swarm-session": name})
        sessions.end(name, "app", rating(outcome), task)
        found += await credits(link)
    assert found == [1.0, -0.5, 0.5, -0.5]


@pytest.mark.anyio
async def test_a_session_whose_outcome_nobody_knows_is_credited_with_nothing(sessions: Sessions) -> None:
    to = route(rated)
    link = say(sessions, to, [user("repair it")], "Done.", headers={"x-swarm-session": "s"})
    sessions.end("s", "app")
    assert await credits(link) == [0.0]
    # and is none of those that others are compared with
    other = say(sessions, to, [user("repair it")], "Done.", headers={"x-swarm-session": "t"})
    sessions.end("t", "app", rating(0.5))
    assert await credits(other) == [0.5]


def rating(score: float) -> Feedback:
    return Feedback(rating=score)


@pytest.mark.anyio
async def test_a_report_is_of_one_key_and_outlives_its_session(sessions: Sessions) -> None:
    to, talk = route(), [user("hi")]
    say(sessions, to, talk, "Hello.", headers={"x-swarm-session": "s"})
    talk.append(user("and?"))
    sub: Messages = [user("look into the folder")]
    agent = {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a1"}
    say(sessions, to, sub, "I looked.", headers={"x-claude-code-session-id": "c"})
    say(sessions, to, sub, "I looked.", headers=agent)
    ask(sessions, to, talk, headers={"x-swarm-session": "s"})
    sessions.end("s", "app")
    assert sessions.reports("s", "another") == []
    [report] = sessions.reports("s", "app")
    assert (report.ended, report.agents[""].requests) == ("endpoint", 2)
    [report] = sessions.reports("c", "app")
    assert {name: ledger.requests for name, ledger in report.agents.items()} == {"": 1, "a1": 1}
