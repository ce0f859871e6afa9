"""Whose data is meant, and what deletions cover."""

from __future__ import annotations

import random
from time import perf_counter

import pytest

from swarm.errors import RequestError
from swarm.subjects import Deletions, Subject, Tombstone, session_names
from swarm.types import Notes

NAMES = ("key", "session", "user", "request_id")


def test_somebody_has_to_be_named() -> None:
    with pytest.raises(RequestError, match="whose data"):
        Subject()


def test_deletions_cover_what_was_begun_before_and_fits_all_names_of_one() -> None:
    draw = random.Random(3)

    def some(least: int) -> dict[str, str]:
        names = draw.sample(NAMES, draw.randint(least, len(NAMES)))
        return {name: draw.choice("abc") for name in names}

    for _ in range(200):
        stones = [
            Tombstone(id=str(number), subject=Subject(**some(1)), until=draw.random())
            for number in range(draw.randrange(12))
        ]
        notes, begun = Notes.model_validate(some(0)), draw.random()
        # of a name that is masked there is a digest
        notes = notes.model_copy(update={"session": draw.choice(session_names(notes.session))})
        covered = any(begun <= stone.until and stone.subject.fits(notes) for stone in stones)
        assert Deletions(stones).cover(notes, begun) == covered


def test_ten_thousand_deletions_cost_what_one_does() -> None:
    stones = [Tombstone(id="", subject=Subject(key=str(number)), until=1.0) for number in range(10_000)]
    notes = Notes(key="his", session="s", user="u", request_id="r")
    many, one = Deletions(stones), Deletions(stones[:1])

    def seconds(deletions: Deletions) -> float:
        began = perf_counter()
        for _ in range(1000):
            deletions.cover(notes, 0.5)
        return perf_counter() - began

    assert min(seconds(many) for _ in range(5)) < 5 * min(seconds(one) for _ in range(5))
