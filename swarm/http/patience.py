"""How long a connection may keep a server waiting, and the one timer that holds it to that.

Invariant: whoever sends nothing, or a head or a body by drops, loses the connection; whoever waits for an answer of
ours, or whose body we do not read, never does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Patience:
    """Seconds. They are looked at every ``look``, so a connection may get that much more.

    Attributes:
        idle: from the connection's begin, or an answer, to the next request's first byte.
        head: from that to the end of the head.
        pause: between two pieces of a body.
        body: from the end of the head to the end of the body.
    """

    idle: float = 75.0
    head: float = 20.0
    pause: float = 30.0
    body: float = 900.0
    look: float = 5.0


class Awaited(Enum):
    """What a connection is waited for."""

    REQUEST = "a request"
    HEAD = "the rest of a request's head"
    BODY = "the rest of a request's body"
    NOTHING = "nothing"


class Watch:
    """Looks at one connection; what happens there costs it no timer, only the time of day.

    Args:
        ours: whether it is we who keep the caller waiting at this moment.
        late: is called once, when what is awaited did not come in time.
    """

    def __init__(self, patience: Patience, ours: Callable[[], bool], late: Callable[[Awaited], None]) -> None:
        self._patience = patience
        self._ours = ours
        self._late = late
        self._loop = asyncio.get_running_loop()
        self.awaited = Awaited.REQUEST
        self._since = self._heard = self._loop.time()
        self._timer = self._loop.call_later(patience.look, self._look)

    def begin(self, awaited: Awaited) -> None:
        """From now on ``awaited`` is."""
        self.awaited = awaited
        self._since = self._heard = self._loop.time()

    def hear(self) -> None:
        """Something has come."""
        self._heard = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if self._ours():
            # what is due after that has its whole time
            self._since = self._heard = now
        if self._is_late(now):
            self._late(self.awaited)
        else:
            self._timer = self._loop.call_later(self._patience.look, self._look)

    def _is_late(self, now: float) -> bool:
        patience = self._patience
        match self.awaited:
            case Awaited.REQUEST:
                return now - self._since > patience.idle
            case Awaited.HEAD:
                return now - self._since > patience.head
            case Awaited.BODY:
                return now - self._since > patience.body or now - self._heard > patience.pause
            case Awaited.NOTHING:
                return False
