"""Retries of one request share one outcome, so that an SDK that asks again trains nothing twice.

Invariant: work that nobody waits for any more is cancelled; one caller's leaving never cancels another's.

Who joins an earlier request of the same caller with the same body:

* any request with the same ``idempotency-key``;
* anyone, where all who waited have hung up and the work goes on in case they come back (:meth:`Mark.grace`);
* an SDK's retry, unless one such request was answered with an error or given up: then it is that one's.

So two equal requests at one time, each a first attempt, get a group each, and so does the retry of one that failed.
What was answered is remembered for :data:`_REMEMBERED_SECONDS`, for a retry whose first answer was lost on the way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from gateway.limits.admission import Guarded
from gateway.limits.retry_identity import Key, Mark
from gateway.limits.stream_replay import Followed, Follower
from gateway.observability.request import answered_by, phase
from gateway.types import Decided, Incoming, Live, Outcome, Relayed
from swarm.errors import ConflictError, UnavailableError

logger = logging.getLogger(__name__)

_REMEMBERED_SECONDS = 20.0
_REMEMBERED_MOST = 128
#: How long the retry of a request that failed is expected, and of how many.
_OWED_SECONDS = 60.0
_OWED_MOST = 1024
#: A sender retries after the last attempt was given up, so more at a time are none of an SDK.
_MOST_FOLLOWERS = 16


class Joining:
    """All requests that a retry may join; of one event loop, an async context manager."""

    def __init__(self) -> None:
        self._flights: dict[Key, list[_Flight]] = {}
        self._answered: dict[_Flight, asyncio.TimerHandle] = {}
        self._flying: set[_Flight] = set()
        #: when requests ended without an answer, by their key, oldest first
        self._owed: dict[Key, deque[float]] = {}
        self.joined = 0

    def __len__(self) -> int:
        """How much work is under way."""
        return len(self._flying)

    async def run(self, incoming: Incoming, route: Guarded, produce: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """The outcome of ``produce()``, or of an earlier request of which this one is a retry.

        Args:
            produce: makes the outcome; called once for all who join. It takes its place (admission) itself: who joins
                needs none, and work that waits for its retry keeps its own. It is cancelled when the last of its
                callers has left.

        Raises:
            ConflictError: an ``idempotency-key`` came before with another body.
        """
        mark = Mark.of(incoming, route)
        if mark is None:
            return await produce()
        flight = self._find(mark)
        if flight is None:
            flight = _Flight(mark, produce, self)
            self._flights.setdefault(mark.key, []).append(flight)
            self._flying.add(flight)
            flight.start()
            return await flight.outcome_for(mark)
        self.joined += 1
        logger.info("request %s joins an earlier one that it repeats", incoming.request_id)
        answered_by(route.name, "joined")
        with phase("join"):
            return await flight.outcome_for(mark)

    def _find(self, mark: Mark) -> _Flight | None:
        known = self._flights.get(mark.key, ())
        if mark.keyed and any(flight.mark.digest != mark.digest for flight in known):
            raise ConflictError(
                "this idempotency-key came with another request before: give each request its own",
                code="idempotency_key_reused",
            )
        open_to = [flight for flight in known if flight.open_to(mark)]
        if not mark.attempt and not mark.keyed:
            # whoever asks anew has had the answers before, or does not want them
            for flight in [flight for flight in known if flight.answered and flight not in open_to]:
                self.forget(flight)
        # first those that nobody waits for, then the youngest
        found = min(reversed(open_to), key=lambda flight: flight.wanted, default=None)
        if found is not None and found.wanted and mark.attempt and not mark.keyed and self._pay(mark):
            return None
        return found

    def owe(self, mark: Mark) -> None:
        """A request with ``mark`` ended without an answer: a retry of it begins anew."""
        if len(self._owed) >= _OWED_MOST:
            del self._owed[next(iter(self._owed))]
        self._owed.setdefault(mark.key, deque(maxlen=_OWED_MOST)).append(asyncio.get_running_loop().time())

    def _pay(self, mark: Mark) -> bool:
        """Whether a request like ``mark`` was owed an answer lately; it is not any more."""
        ended = self._owed.pop(mark.key, None)
        now = asyncio.get_running_loop().time()
        while ended and ended[0] < now - _OWED_SECONDS:
            ended.popleft()
        if not ended:
            return False
        ended.popleft()
        if ended:
            self._owed[mark.key] = ended
        return True

    def landed(self, flight: _Flight) -> None:
        """``flight`` is over; it is remembered if it was answered."""
        self._flying.discard(flight)
        if not flight.answered:
            self.forget(flight)
            return
        while len(self._answered) >= _REMEMBERED_MOST:
            self.forget(next(iter(self._answered)))
        loop = asyncio.get_running_loop()
        self._answered[flight] = loop.call_later(_REMEMBERED_SECONDS, self.forget, flight)

    def forget(self, flight: _Flight) -> None:
        """Nobody joins ``flight`` any more."""
        if (timer := self._answered.pop(flight, None)) is not None:
            timer.cancel()
        same = self._flights.get(flight.mark.key, [])
        if flight in same:
            same.remove(flight)
            if not same:
                del self._flights[flight.mark.key]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for flight in list(self._answered):
            self.forget(flight)
        if flying := [flight.cancel() for flight in self._flying]:
            await asyncio.wait(flying)


class _Flight:
    """One request's work, in a task of its own, and those who wait for it."""

    def __init__(self, mark: Mark, produce: Callable[[], Awaitable[Outcome]], joining: Joining) -> None:
        self.mark = mark
        self.callers = 0
        #: answered whole and well: worth remembering
        self._well = False
        self._over = False
        self._attempt = mark.attempt
        self._delivered = False
        self._produce = produce
        self._joining = joining
        self._decided = asyncio.Event()
        self._alone = asyncio.Event()
        self._outcome: Outcome | None = None
        self._followed: Followed[Any] | None = None
        self._error: Exception | None = None
        self._cancelled = False
        self._grace: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def answered(self) -> bool:
        """Whether it is over and was answered well."""
        return self._over and self._well

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it, or has got it."""
        return self.callers > 0 or self._delivered

    def start(self) -> None:
        self._task = asyncio.create_task(self._fly(), name="answering a request that may be retried")

    def cancel(self) -> asyncio.Task[None]:
        """End the work; nobody joins it any more."""
        assert self._task is not None
        self._cancelled = True
        self._joining.forget(self)
        self._task.cancel()
        return self._task

    def open_to(self, mark: Mark) -> bool:
        """Whether a request with ``mark`` shares this work; its key is the same."""
        if self._cancelled or self.callers >= _MOST_FOLLOWERS:
            return False
        if self._followed is not None and not self._followed.open:
            return False
        if mark.keyed or mark.attempt > self._attempt:
            return True
        return not self.wanted

    async def outcome_for(self, mark: Mark) -> Outcome:
        """The outcome for one more caller, who leaves by being cancelled, or by closing what streams."""
        self.callers += 1
        self._attempt = max(self._attempt, mark.attempt)
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        started = asyncio.get_running_loop().time()
        try:
            await self._decided.wait()
        except asyncio.CancelledError:
            self._left(mark, started)
            raise
        if self._outcome is None:
            self.callers -= 1
            self._joining.owe(mark)
            assert self._error is not None
            raise self._error
        return self._copy(self._outcome, mark, started)

    def _copy(self, outcome: Outcome, mark: Mark, started: float) -> Outcome:
        """``outcome`` for one caller."""
        followed = self._followed
        follower: Follower[Any] | None = None if followed is None else followed.follow()
        here = True

        async def close() -> None:
            nonlocal here
            if here:
                here = False
                if follower is not None:
                    follower.leave()
                self._delivered = self._delivered or followed is None or followed.over
                self._left(mark, started)

        if follower is None:
            if not self._well:
                self._joining.owe(mark)
            return replace(outcome, close=close)
        if isinstance(outcome, Relayed):
            return replace(outcome, body=follower, close=close)
        assert isinstance(outcome, Live)
        return replace(outcome, chunks=follower, close=close)

    def _left(self, mark: Mark, started: float) -> None:
        self.callers -= 1
        assert self._task is not None
        if self.callers or self._task.done():
            return
        if self._outcome is not None and self._followed is None:
            self._alone.set()
            return
        loop = asyncio.get_running_loop()
        grace = mark.grace(loop.time() - started) if self._followed is None or self._followed.open else 0.0
        if grace:
            self._grace = loop.call_later(grace, self.cancel)
        else:
            self._joining.owe(mark)
            self.cancel()

    async def _fly(self) -> None:
        try:
            outcome = await self._produce()
            await self._carry(outcome)
        except asyncio.CancelledError:
            self._error = UnavailableError("the gateway stops before there is an answer", retry_after=1.0)
            raise
        except Exception as exc:
            self._error = exc
        finally:
            if self._grace is not None:
                self._grace.cancel()
            self._over = True
            self._decided.set()
            self._joining.landed(self)

    async def _carry(self, outcome: Outcome) -> None:
        """Hand ``outcome`` out, and hold it while somebody is at it; read on what streams."""
        try:
            stream = _stream(outcome)
            self._outcome = outcome
            if stream is None:
                self._well = not isinstance(outcome, Relayed) or outcome.status < 400
                self._decided.set()
                if self.callers:
                    await self._alone.wait()
            else:
                followed = self._followed = Followed[Any]()
                self._decided.set()
                await followed.read(stream)
                self._well = followed.error is None and followed.open
        finally:
            if outcome.close is not None:
                await outcome.close()


def _stream(outcome: Outcome) -> Any:
    """What comes in parts, of an outcome that is not whole."""
    if isinstance(outcome, Decided):
        return None
    if isinstance(outcome, Relayed):
        return None if isinstance(outcome.body, bytes) else outcome.body
    return outcome.chunks
