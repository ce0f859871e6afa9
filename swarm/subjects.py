"""Whose data is meant, when people ask what is kept of them or want it gone, and what is answered.

Invariant: a user's own name is nowhere on disk, only its digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from swarm.errors import RequestError
from swarm.types import Model, Notes

Named = Literal["key", "session", "user", "request_id"]
#: Why episodes are given back that have an answer which may not be kept.
PRIVATE_DATA = "private_data"
_NAMES: tuple[Named, ...] = get_args(Named)


def user_digest(user: str) -> str:
    """What is noted of a user whom an application names: 32 hexadecimal digits, the same for the same name."""
    return hashlib.blake2b(user.encode("utf-8", "replace"), digest_size=16).hexdigest() if user else ""


def session_names(session: str) -> tuple[str, ...]:
    """What a session is called that an application calls so: its name, or where names are masked (``redact:
    before_sampling``) and this one is private, its digest."""
    return (session, user_digest(session)) if session else ("",)


class Subject(Model):
    """Everything that fits all names which are given; at least one is, or it is a :class:`RequestError`."""

    key: str = Field(default="", max_length=200, description="id of a gateway's key")
    session: str = Field(default="", max_length=500, description="name of a conversation")
    user: str = Field(default="", max_length=200, description="digest of the user's name")
    request_id: str = Field(default="", max_length=500)

    @model_validator(mode="after")
    def _names_someone(self) -> Self:
        if not any(value for _, value in self.names()):
            raise RequestError("say whose data is meant: name a key, a session, a user or a request", param="key")
        return self

    def names(self) -> Iterator[tuple[Named, str]]:
        """The names that are given."""
        for name in _NAMES:
            if value := getattr(self, name):
                yield name, value

    def noted(self) -> Iterator[tuple[Named, tuple[str, ...]]]:
        """For each name that is given, what notes may have of it."""
        for name, value in self.names():
            yield name, session_names(value) if name == "session" else (value,)

    def fits(self, notes: Notes) -> bool:
        """Whether an episode with these notes is the subject's."""
        return all(getattr(notes, name) in values for name, values in self.noted())

    def needles(self) -> list[list[str]]:
        """Parts that the JSON of such notes has, one of each list."""
        return [[json.dumps({name: value})[1:-1] for value in values] for name, values in self.noted()]


class Tombstone(Model):
    """What was deleted: all of ``subject`` that was claimed ``until`` then (Unix seconds). It has no texts.

    ``batches`` had been given to the trainer with some of it: what names the versions that learned from it. ``exports``
    may hold some of it.
    """

    id: str
    subject: Subject
    until: float
    episodes: int = 0
    batches: list[str] = []
    exports: list[str] = []


class Deletions:
    """Until when the data of whom was deleted, on one clock: what was under way then leaves nothing behind."""

    def __init__(self, stones: Iterable[Tombstone] = ()) -> None:
        self._until: dict[tuple[str, ...], float] = {}
        for stone in stones:
            self.add(stone.subject, stone.until)

    def add(self, subject: Subject, until: float) -> None:
        """Note that what was begun ``until`` then is deleted."""
        noted = dict(subject.noted())
        for names in product(*(noted.get(name, ("",)) for name in _NAMES)):
            self._until[names] = max(until, self._until.get(names, -math.inf))

    def cover(self, notes: Notes, begun: float) -> bool:
        """Whether what was ``begun`` then with these notes is deleted; costs the same however many deletions there
        were."""
        if not self._until:
            return False
        names_given = [(value, "") if (value := getattr(notes, name)) else ("",) for name in _NAMES]
        return any(begun <= self._until.get(names, -math.inf) for names in product(*names_given))


class LearnedVersion(Model):
    """A policy version: ``step`` of a run. ``current``: what is served now descends from it."""

    run_id: str
    step: int
    current: bool


class DataReport(Model):
    """What a swarm server has of a subject, and which policy versions were trained on it.

    ``episodes`` counts them by state; ``earlier`` are deletions of the same subject; ``clean_step`` is the newest
    version in the line of the current one that was not trained on any of it (0: the first weights), to fork from;
    ``exports`` are files that were written since the first of it was claimed: they may hold it, and are not
    deleted.
    """

    episodes: dict[str, int] = {}
    requests: list[str] = []
    earlier: list[Tombstone] = []
    versions: list[LearnedVersion] = []
    clean_step: int = 0
    exports: list[str] = []
    deleted: bool = False
    gateway: dict[str, int] = Field(default={}, description="what the gateway that was asked had and deleted")
