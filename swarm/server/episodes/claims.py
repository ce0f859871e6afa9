"""Claims that wait, and the grants of claims that may be repeated.

Invariant: claims are served in the order in which they arrived, except that they pass those which only their client's
share or the cache holds back; a group keeps its place from one poll of its client to the next. All claims with one
client and key share one grant, which goes back if nobody takes it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm.concurrency import until_gone
from swarm.errors import ConflictError
from swarm.protocol import LONG_POLL
from swarm.server.episodes.episode import ClaimWish, Grant, Refusal
from swarm.server.episodes.pool import EpisodePool

#: seconds for which the key of a granted or withdrawn claim is remembered, unless there are more than MAX_KEYS
KEY_SECONDS = 120.0
MAX_KEYS = 100_000
#: claims of one client that wait for the next batch to open (``while_closed``): its HTTP client may have a pool of 100
#: connections, of which its other requests need some
MOST_HELD = 64
#: seconds for which a group keeps its place until its client polls again
BETWEEN_POLLS = 1.0

#: client, key of the claim
Name = tuple[str, str]


@dataclass(eq=False)
class WaitingClaim:
    """A claim in the queue: ``callers`` wait until it is ``granted`` or refused; ``reason`` and ``holds_place`` are of
    the last :class:`Refusal`."""

    wish: ClaimWish
    reason: str = ""
    callers: int = 0
    holds_place: bool = True
    since: float = field(default_factory=time.monotonic)
    taken: bool = False
    granted: asyncio.Future[Grant | Refusal] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def name(self) -> Name:
        return (self.wish.client_uuid, self.wish.claim_key)


class ClaimQueue:
    """The queue of one server; ``pool`` gives the pool once there is a job."""

    def __init__(self, pool: Callable[[], EpisodePool | None]) -> None:
        self._pool = pool
        self._waiting: dict[WaitingClaim, None] = {}
        self._joinable: dict[Name, WaitingClaim] = {}
        #: those between two polls, and until when they keep their places
        self._between: dict[WaitingClaim, float] = {}
        self._granted: OrderedDict[Name, tuple[float, tuple[str, ...]]] = OrderedDict()
        #: when each claim was withdrawn: a withdrawal may overtake its claim on the network
        self._withdrawn: OrderedDict[Name, float] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        """How many claims wait; repetitions of one are one."""
        return len(self._waiting)

    def longest_wait(self) -> float:
        """For how many seconds the first claim in the queue has been waiting."""
        return time.monotonic() - next(iter(self._waiting)).since if self._waiting else 0.0

    def claim(self, wish: ClaimWish, *, wait: bool) -> Grant | WaitingClaim | Refusal:
        """Grant ``wish`` now, or let it queue up (if it may ``wait``); then :meth:`wait` must be called at once.

        Raises:
            ConflictError: the key was used for a claim of another size, or that claim was withdrawn
                (``claim_withdrawn``).
        """
        name = (wish.client_uuid, wish.claim_key)
        if name in self._withdrawn:
            raise ConflictError(
                "the claim with this idempotency_key was withdrawn: use another for another claim",
                code="claim_withdrawn",
            )
        if wish.claim_key and (pool := self._pool()) is not None and (grant := self._granted.get(name)) is not None:
            _check_same(wish, len(grant[1]))
            return pool.running.grant_again(grant[1], as_group=wish.as_group)
        if wish.claim_key and (waiting := self._joinable.get(name)) is not None:
            _check_same(wish, waiting.wish.episodes)
            waiting.callers += 1
            if self._between.pop(waiting, None) is not None:
                # each poll has the share of now
                waiting.wish = wish
                self.serve()
            return waiting
        refusal = Refusal("")
        if not self._waiting:
            outcome = self._try(wish)
            if isinstance(outcome, Grant) or _not_needed(wish, outcome):
                return outcome
            refusal = outcome
        if _gives_way(wish) and (pool := self._pool()) is not None and (reason := pool.no_episode_needed):
            return Refusal(reason)
        if self._closed or not (wait or self._waiting) or (wish.while_closed and self._held(wish) >= MOST_HELD):
            return refusal
        waiting = WaitingClaim(wish, refusal.reason, callers=1, holds_place=refusal.holds_place)
        self._waiting[waiting] = None
        if wish.claim_key:
            self._joinable[name] = waiting
        if len(self._waiting) > 1:
            # all claims before it may be held back for reasons of their own
            self.serve()
        if waiting.granted.done():
            return waiting.granted.result()
        if not wait:
            self._leave(waiting)
            return Refusal(waiting.reason)
        return waiting

    async def wait(
        self, waiting: WaitingClaim, within: float, receive: Callable[[], Awaitable[Any]] | None = None
    ) -> Grant | Refusal:
        """The outcome of a claim after at most ``within`` seconds.

        Raises:
            ClientGoneError: the caller, whose ASGI ``receive`` this is, left.
        """
        polls_again = False
        try:
            work = asyncio.wait([waiting.granted], timeout=within)
            await (work if receive is None else until_gone(receive, work))
            if waiting.granted.done() and not waiting.granted.cancelled():
                waiting.taken = True
                return waiting.granted.result()
            # who gives up at the end of its patience has polled for less
            polls_again = within >= LONG_POLL and not waiting.granted.cancelled()
            return Refusal(waiting.reason)
        finally:
            self._leave(waiting, polls_again=polls_again)

    def withdraw(self, client_uuid: str, claim_key: str) -> None:
        """Cancel the claim with this key, abort what it was granted, and reject it from now on: it may arrive later."""
        if not claim_key:
            return
        name = (client_uuid, claim_key)
        now = time.monotonic()
        self._withdrawn[name] = now
        self._withdrawn.move_to_end(name)
        while len(self._withdrawn) > MAX_KEYS or next(iter(self._withdrawn.values())) < now - KEY_SECONDS:
            self._withdrawn.popitem(last=False)
        if (waiting := self._joinable.get(name)) is not None:
            self._unqueue(waiting)
            waiting.granted.cancel()
        elif (grant := self._granted.get(name)) is not None and (pool := self._pool()) is not None:
            for episode_uuid in grant[1]:
                pool.abort(client_uuid, episode_uuid, "claim_withdrawn")
        # it may have held up the claims behind it
        self.serve()

    def serve(self) -> None:
        """Grant what can be granted now."""
        if self._closed:
            # whoever waits has an answer, and is about to leave
            return
        while (lapse := self.next_lapse()) is not None and lapse <= time.monotonic():
            self._unqueue(next(iter(self._between)))
        for waiting in list(self._waiting):
            if waiting in self._between:
                # nobody is there to take it, but if those behind took what is free, a group would wait for ever
                if waiting.holds_place:
                    break
                continue
            outcome = self._try(waiting.wish)
            if isinstance(outcome, Grant) or _not_needed(waiting.wish, outcome):
                self._unqueue(waiting)
                waiting.granted.set_result(outcome)
                continue
            waiting.reason, waiting.holds_place = outcome.reason, outcome.holds_place
            if outcome.holds_place:
                # strictly first in, first out: a group that needs four slots must not starve behind single claims
                if not outcome.closed:
                    # some waited only for the next batch to open: it is open and has no place for them
                    self._refuse(outcome, lambda wish: wish.while_closed)
                break
        # the last grant may have been the last that is needed
        if (pool := self._pool()) is not None and (reason := pool.no_episode_needed):
            self._refuse(Refusal(reason), _gives_way)

    def next_lapse(self) -> float | None:
        """When, in monotonic seconds, a claim loses its place whose client does not poll again."""
        return next(iter(self._between.values()), None)

    def give_back(self, wish: ClaimWish, grant: Grant) -> None:
        """Abort the episodes of a grant that nobody took, and forget it."""
        self._granted.pop((wish.client_uuid, wish.claim_key), None)
        pool = self._pool()
        assert pool is not None, "a grant implies a pool"
        for claim in grant.claims:
            pool.abort(wish.client_uuid, claim.episode_uuid)
        self.serve()

    def restore(self, claims: Mapping[Name, list[str]]) -> None:
        """Remember claims that were granted before a restart, oldest first."""
        for name, episode_uuids in claims.items():
            self._remember(name, tuple(episode_uuids))

    def close(self) -> None:
        """Answer everyone who waits, and let nobody wait again."""
        self._closed = True
        self._between.clear()
        for waiting in self._waiting:
            waiting.granted.cancel()

    def _held(self, wish: ClaimWish) -> int:
        return sum(claim.wish.while_closed and claim.wish.client_uuid == wish.client_uuid for claim in self._waiting)

    def _refuse(self, refusal: Refusal, whom: Callable[[ClaimWish], bool]) -> None:
        for waiting in [claim for claim in self._waiting if whom(claim.wish) and not claim.granted.done()]:
            self._unqueue(waiting)
            waiting.granted.set_result(refusal)

    def _try(self, wish: ClaimWish) -> Grant | Refusal:
        pool = self._pool()
        outcome = Refusal("") if pool is None or self._closed else pool.claim(wish)
        if isinstance(outcome, Grant) and wish.claim_key:
            episode_uuids = tuple(claim.episode_uuid for claim in outcome.claims)
            self._remember((wish.client_uuid, wish.claim_key), episode_uuids)
        return outcome

    def _remember(self, name: Name, episode_uuids: tuple[str, ...]) -> None:
        now = time.monotonic()
        self._granted[name] = (now, episode_uuids)
        while len(self._granted) > MAX_KEYS or next(iter(self._granted.values()))[0] < now - KEY_SECONDS:
            self._granted.popitem(last=False)

    def _leave(self, waiting: WaitingClaim, *, polls_again: bool = False) -> None:
        waiting.callers -= 1
        if waiting.callers:
            return
        if polls_again and waiting.wish.claim_key and waiting.wish.episodes > 1:
            self._between[waiting] = time.monotonic() + BETWEEN_POLLS
        elif not waiting.granted.done() or waiting.granted.cancelled():
            self._unqueue(waiting)
            # it may have held up the claims behind it
            self.serve()
        elif not waiting.taken and isinstance(grant := waiting.granted.result(), Grant):
            self.give_back(waiting.wish, grant)

    def _unqueue(self, waiting: WaitingClaim) -> None:
        self._waiting.pop(waiting, None)
        self._between.pop(waiting, None)
        if self._joinable.get(waiting.name) is waiting:
            del self._joinable[waiting.name]


def _gives_way(wish: ClaimWish) -> bool:
    """Whether the claim is refused, instead of queued, while no train episode is needed."""
    return wish.unless_batch_waits and wish.episode_type == "train"


def _not_needed(wish: ClaimWish, refusal: Refusal) -> bool:
    """Whether the claim is refused, instead of queued: its client has its share of the batch, or a batch is open."""
    return (refusal.share_full and _gives_way(wish)) or (wish.while_closed and not refusal.closed)


def _check_same(wish: ClaimWish, count: int) -> None:
    if wish.episodes != count:
        raise ConflictError(
            f"this idempotency_key claimed {count} episodes before, not {wish.episodes}: use another for another claim",
            code="idempotency_key_reused",
        )
