"""What users said of both sides' answers, and the guard that it gives."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.evidence.betting import Wealth
from swarm.evidence.pairs import GateRules, Pair, Side, SideResult, Terms
from swarm.evidence.ratings import Ratings, SideRating
from swarm.evidence.verdict import PairedEvidence

TERMS = Terms(rules=GateRules(max_rating_drop=0.2))


def rated(side: Side, value: float, answer: str) -> SideRating:
    return SideRating(answer=answer, terms=TERMS, side=side, rating=value)


def filled(ours: list[float], theirs: list[float], most: float = 0.2) -> Ratings:
    ratings = Ratings(most)
    for side, values in (("challenger", ours), ("incumbent", theirs)):
        for number, value in enumerate(values):
            ratings.add(rated(side, value, f"{side} {number}"))
    return ratings


def test_what_users_like_less_is_found_and_what_they_like_as_much_is_not() -> None:
    chance = random.Random(7)
    good = [chance.choice((1.0, 1.0, 1.0, -1.0)) for _ in range(200)]
    bad = [chance.choice((1.0, -1.0, -1.0, -1.0)) for _ in range(200)]
    assert filled(bad, good).lower(0.01)
    assert not filled(good, good[::-1]).lower(0.01)
    assert not filled(good, bad).lower(0.01)
    assert not filled(bad, []).lower(0.5), "there is nothing to compare with"
    assert filled(bad, good[:150]).counts == (200, 150)


def test_a_drop_that_is_allowed_proves_nothing_however_many_rate_and_a_larger_one_does() -> None:
    assert not filled([0.75] * 1000, [1.0] * 1000, most=0.25).lower(0.5)
    assert filled([0.625] * 1000, [1.0] * 1000, most=0.25).lower(0.01)
    assert filled([-1.0], [1.0]).lower(0.9), "the first ratings count"


def test_equal_sides_are_seldom_told_apart_however_often_one_looks() -> None:
    chance, alarms = random.Random(11), 0
    for _ in range(200):
        ratings = Ratings(0.0)
        for number in range(60):
            for side in ("challenger", "incumbent"):
                ratings.add(rated(side, chance.choice((-1.0, 1.0)), f"{side} {number}"))
            if ratings.lower(0.05):
                alarms += 1
                break
    assert alarms <= 10


@given(
    st.lists(st.tuples(st.sampled_from(("challenger", "incumbent")), st.integers(0, 5), st.floats(-1, 1)), max_size=30)
)
def test_the_latest_rating_of_an_answer_counts_and_no_other(made: list[tuple[Side, int, float]]) -> None:
    latest: dict[tuple[Side, int], float] = {}
    ratings = Ratings(0.2)
    for side, answer, value in made:
        latest[side, answer] = value
        ratings.add(rated(side, value, str(answer)))
        # looking changes nothing
        ratings.lower(0.05)
    once = Ratings(0.2)
    for (side, answer), value in latest.items():
        once.add(rated(side, value, str(answer)))
    assert ratings.lower(0.05) == once.lower(0.05)
    assert vars(ratings) == vars(once)


def test_a_rating_that_is_repeated_takes_no_bet_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bets: list[float] = []

    def add(wealth: Wealth, value: float) -> None:
        bets.append(value)

    monkeypatch.setattr(Wealth, "add", add)
    ratings = filled([-1.0] * 5, [1.0] * 5)
    for _ in range(2):
        ratings.lower(0.05)
        ratings.add(rated("challenger", -1.0, "challenger 0"))
    assert bets == [1.0] * 5


def test_the_guard_makes_the_challenger_worse_and_the_sentence_says_so() -> None:
    evidence = PairedEvidence(TERMS)
    for number in range(300):
        result = SideResult(reward=0.5 + number % 2 / 10)
        evidence.add(Pair(group_id=str(number), terms=TERMS, challenger=result, incumbent=result))
    assert evidence.promotable() and not evidence.alarm()
    for number in range(100):
        evidence.rate(rated("challenger", -1.0, f"c{number}"))
        evidence.rate(rated("incumbent", 1.0, f"i{number}"))
    verdict = evidence.verdict()
    assert evidence.alarm() and not evidence.promotable()
    assert verdict.guards == ("rating_drop",) and verdict.rated == (100, 100)
    assert verdict.sentence.endswith("; rated lower than max_rating_drop 0.2 allows")
