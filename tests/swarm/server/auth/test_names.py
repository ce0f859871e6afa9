"""Names of clients belong to tokens; the memory of that is bounded."""

from __future__ import annotations

import pytest

from swarm.errors import ForbiddenError
from swarm.server.api.episodes import ClientNames
from swarm.server.auth import Caller

ANN, BOB = Caller("ann", frozenset({"claim"})), Caller("bob", frozenset({"claim"}))
ROOT = Caller("root", frozenset({"admin"}))


def test_the_first_one_has_it() -> None:
    names = ClientNames()
    for _ in range(2):
        names.check(ANN, "a")
        names.check(ROOT, "a")
        with pytest.raises(ForbiddenError, match=r"client_uuid 'a' is used with another token than 'bob'"):
            names.check(BOB, "a")
    names.check(ROOT, "r")
    with pytest.raises(ForbiddenError):
        names.check(ANN, "r")
    names.check(BOB, "b")


def test_the_oldest_is_forgotten_first() -> None:
    names = ClientNames(limit=2)
    for name in ("1", "2", "3"):
        names.check(ANN, name)
    names.check(BOB, "1")
    with pytest.raises(ForbiddenError):
        names.check(BOB, "3")
