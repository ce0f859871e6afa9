"""One conversation: its turns, which form a tree where the user went back, and where a new request stands in it.

Invariant: a conversation belongs to one caller and one route; nothing of another's is ever found through it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gateway.sessions.ports import Route
from gateway.sessions.turns import DeliveredTurn
from reward_hooks import Feedback, Session


class Scope(NamedTuple):
    """Who may go on with a conversation: callers with one key on one route, that name the session or the user alike."""

    route: str
    key_id: str
    kind: Literal["session", "user", "anyone"]
    name: str


@dataclass(eq=False)
class Conversation:
    """``feedback`` is about the whole of it; ``size`` is in bytes; ``ending`` ends it when it idles."""

    scope: Scope
    session_id: str
    route: Route
    turns: list[DeliveredTurn] = field(default_factory=list[DeliveredTurn])
    size: int = 0
    over: bool = False
    feedback: Feedback | None = None
    ending: asyncio.TimerHandle | None = None

    def session(self, turns: list[DeliveredTurn]) -> Session:
        """What hooks see of ``turns``."""
        return Session(session_id=self.session_id, turns=[turn.as_turn() for turn in turns], feedback=self.feedback)

    def after(self, parent: DeliveredTurn | None) -> list[DeliveredTurn]:
        """The turns that go on from ``parent`` (``None``: that begin), oldest first."""
        return [turn for turn in self.turns if turn.parent is parent]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands: it goes on from ``parent``.

    Attributes:
        known: how that is known. ``answer``: the answer is in its messages; ``altered``: so is another in the answer's
            place; ``question``: the request came before; ``name``: it names the session, and nothing else tells.
        strength: of ``altered``: how alike the two answers are.
    """

    conversation: Conversation
    parent: DeliveredTurn | None
    known: Literal["answer", "altered", "question", "name"]
    strength: float = 1.0
