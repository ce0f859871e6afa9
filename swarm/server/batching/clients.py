"""The clients: who is active, who agrees, and what each of them has done.

Invariant: a batch that all must agree on waits for the clients that take part in it (they ended or aborted a train
episode since the last batch left), but not for those that gave no sign of life for ``timeout`` seconds. At most
``limit`` clients are remembered; the longest silent are forgotten first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

#: clients remembered at most, unless more of them have LLM calls in flight
MAX_CLIENTS = 10_000
#: silent clients that a monitor is shown, the latest: programs that came once and never again are many in some weeks
MAX_SILENT = 100

Count = Literal["timed_out", "trained", "dropped"]


#: seconds added to the times of :meth:`RollingClock.when`, so that rounding makes none early
_LATE = 1e-3


class RollingClock:
    """Seconds of ``clock`` during which claims could be granted; it begins running.

    It stands still while the engine does not roll: clients cannot show a sign of life during a long step, so that time
    is not held against them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._offset = 0.0
        self._stopped_at: float | None = None

    def __call__(self) -> float:
        return (self._clock() if self._stopped_at is None else self._stopped_at) - self._offset

    def follow(self, rolling: bool) -> None:
        """Run or stand still from now on."""
        if rolling and self._stopped_at is not None:
            self._offset += self._clock() - self._stopped_at
            self._stopped_at = None
        elif not rolling and self._stopped_at is None:
            self._stopped_at = self._clock()

    def when(self, time: float) -> float | None:
        """When it will show ``time``, in seconds of ``clock``; ``None`` while it stands still."""
        return None if self._stopped_at is not None else time + self._offset + _LATE


@dataclass(eq=False, slots=True)
class Client:
    """What is known about one client; ``last_seen`` is on the wall clock, the counts are of episodes. While one of its
    LLM calls is in flight it is active."""

    last_seen: float = 0.0
    in_flight: int = 0
    takes_part: bool = False
    agreed: bool = False
    throttled: bool = False
    claimed: int = 0
    ended: int = 0
    aborted: int = 0
    timed_out: int = 0
    trained: int = 0
    dropped: int = 0


class Clients:
    """Activity, agreements and counts by client.

    A client is active until ``timeout`` seconds after its last sign of life, and while one of its LLM calls is in
    flight; it is training likewise, judged by its train episodes only. ``clock`` may stand still, ``wall_clock`` never.
    """

    def __init__(
        self, timeout: float, clock: Callable[[], float], wall_clock: Callable[[], float], limit: int = MAX_CLIENTS
    ) -> None:
        self._timeout = timeout
        self._clock = clock
        self._wall_clock = wall_clock
        self._limit = limit
        self._clients: dict[str, Client] = {}
        # in the order of the last sign of life, so that the client that lapses next is first
        self._active: OrderedDict[str, float] = OrderedDict()
        self._training: OrderedDict[str, float] = OrderedDict()
        self._lapsed: OrderedDict[str, None] = OrderedDict()
        #: no client lapses before
        self._next_lapse = -math.inf
        self._agreements = 0
        #: clients that are active, take part and have yet to agree
        self._awaited: set[str] = set()

    # ------------------------------------------------------------------ what happens

    def seen(self, client_uuid: str, *, train: bool) -> Client:
        """A sign of life; returns the client, for its counts."""
        now = self._clock()
        self._lapse(now)
        client = self._clients.get(client_uuid)
        if client is None:
            client = self._clients[client_uuid] = Client()
        client.last_seen = self._wall_clock()
        if client_uuid not in self._active:
            self._lapsed.pop(client_uuid, None)
            if client.takes_part and not client.agreed:
                self._awaited.add(client_uuid)
        self._active[client_uuid] = now
        self._active.move_to_end(client_uuid)
        if train:
            self._training[client_uuid] = now
            self._training.move_to_end(client_uuid)
        if len(self._clients) > self._limit:
            self._forget_one()
        return client

    def remember(self, client_uuid: str) -> None:
        """The client was known before a restart; that is no sign of life."""
        if client_uuid and client_uuid not in self._clients:
            self._clients[client_uuid] = Client(self._wall_clock())
            self._lapsed[client_uuid] = None
            if len(self._clients) > self._limit:
                self._forget_one()

    def take_part(self, client_uuid: str) -> None:
        """The client has ended or aborted a train episode: a batch that all agree on waits for it."""
        client = self.seen(client_uuid, train=True)
        client.takes_part = True
        if not client.agreed:
            self._awaited.add(client_uuid)

    def agree(self, client_uuid: str) -> None:
        """The client has no more for the current batch."""
        client = self.seen(client_uuid, train=True)
        if not client.agreed:
            client.agreed = True
            self._agreements += 1
            self._awaited.discard(client_uuid)

    def restore_agreement(self, client_uuid: str) -> None:
        """The client agreed before a restart; that is no sign of life."""
        self.remember(client_uuid)
        self._agreements += 1
        client = self._clients.get(client_uuid)
        if client is not None and not client.agreed:
            client.agreed = True
            self._awaited.discard(client_uuid)

    def end_agreements(self) -> None:
        """Another batch begins: participation and agreement are counted anew."""
        for client in self._clients.values():
            client.agreed = client.takes_part = False
        self._agreements = 0
        self._awaited.clear()

    def count(self, client_uuids: Iterable[str], what: Count) -> None:
        """Count one episode for each of ``client_uuids`` that is still remembered."""
        for client_uuid in client_uuids:
            if client := self._clients.get(client_uuid):
                setattr(client, what, getattr(client, what) + 1)

    def throttled(self, client_uuid: str, throttled: bool) -> None:
        """Whether the client's last claim waits for its share."""
        if client := self._clients.get(client_uuid):
            client.throttled = throttled

    # ------------------------------------------------------------------ what is

    def is_active(self, client_uuid: str) -> bool:
        self._lapse(self._clock())
        return client_uuid in self._active

    @property
    def any_agreed(self) -> bool:
        """Whether any client agreed, whether it is still active or not."""
        return self._agreements > 0

    @property
    def all_agreed(self) -> bool:
        """Whether a client agreed, and every active client that takes part did."""
        self._lapse(self._clock())
        return self._agreements > 0 and not self._awaited

    def others_train(self, client_uuid: str) -> bool:
        """Whether another client is active with train episodes."""
        self._lapse(self._clock())
        return len(self._training) > (client_uuid in self._training)

    def next_lapse(self) -> float | None:
        """When the next client will have been silent for ``timeout`` seconds."""
        self._lapse(self._clock())
        firsts = [next(iter(signs.values())) for signs in (self._active, self._training) if signs]
        return min(firsts) + self._timeout if firsts else None

    def rows(self) -> list[tuple[str, Client]]:
        """The active clients, the latest of the silent ones, and those of them that agree; last seen first."""
        self._lapse(self._clock())
        shown = [*reversed(self._active)]
        shown += [
            name
            for number, name in enumerate(reversed(self._lapsed))
            if number < MAX_SILENT or self._clients[name].agreed
        ]
        return [(name, self._clients[name]) for name in shown]

    @property
    def silent(self) -> int:
        """How many of the clients that are remembered are not active."""
        self._lapse(self._clock())
        return len(self._lapsed)

    def _lapse(self, now: float) -> None:
        if now < self._next_lapse:
            return
        # later signs of life cannot lapse earlier
        self._next_lapse = now + self._timeout
        for signs in (self._active, self._training):
            while signs:
                name, since = next(iter(signs.items()))
                # the same sum as in next_lapse: a difference could round so that next_lapse is too early
                if since + self._timeout > now:
                    self._next_lapse = min(self._next_lapse, since + self._timeout)
                    break
                if self._clients[name].in_flight:
                    signs[name] = now
                    signs.move_to_end(name)
                    continue
                del signs[name]
                if signs is self._active:
                    self._lapsed[name] = None
                    self._awaited.discard(name)

    def _forget_one(self) -> None:
        name = next(iter(self._lapsed or self._active))
        client = self._clients[name]
        if client.in_flight:
            return
        self._active.pop(name, None)
        self._awaited.discard(name)
        self._training.pop(name, None)
        self._lapsed.pop(name, None)
        # its agreement, if any, stands: the count of agreements is not changed
        del self._clients[name]
