"""Before a request's work begins: :class:`Admission` gives it a place on its route, and :class:`RetryDedup` has a retry
share the outcome of the request that it repeats, so that an SDK's retry trains nothing twice.

Invariant: a route serves at most ``max_in_flight`` requests at once and lets at most ``max_queued`` wait, as many for
each key's own place, each for at most ``queue_seconds``; no place is lost, however its holder leaves. Work that nobody
waits for is cancelled; one caller's leaving never cancels another's.

A reload that changes ``max_in_flight`` counts the requests of the old bound apart until they have ended.

A request joins an earlier one of the same caller on the same route, in flight or answered within the last
:data:`_REMEMBERED_SECONDS`, if it has the same ``idempotency-key``, or the same body and is a retry of OpenAI's or
Anthropic's SDK (:func:`swarm.http.asgi.is_sdk_retry`). Errors are not joined, and a retry of one joins nothing: the
equal request that was answered beside it may be for another sample.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from gateway.config.route import RouteSettings
from gateway.observability.request import note, phase
from gateway.sessions.conversation import AGENT_HEADERS
from gateway.types import Caller, Incoming, Live, Outcome, Relayed, stream_of
from swarm.concurrency import Latest, Signal
from swarm.errors import ConflictError, OverloadedError, UnavailableError
from swarm.http.asgi import SDK_RETRIES, is_sdk_retry

logger = logging.getLogger(__name__)

#: Weight of each ended request in the average of how long requests are served.
_SMOOTHING = 0.1
_SHORTEST_RETRY, _LONGEST_RETRY = 1.0, 60.0
_REMEMBERED_SECONDS = 20.0
_REMEMBERED_MOST = 128
#: An SDK repeats a request within so long after an error, also where that names a time (of a minute at most).
_LATEST_RETRY = 75.0
#: Parts of a stream beyond which nobody joins it any more, and it is not remembered.
_MOST_PARTS = 20_000
#: A caller with an idempotency key who hangs up has so long to come back.
_KEYED_GRACE = 5.0


@dataclass(slots=True)
class Load:
    """How full a route is; ``refused`` counts requests turned away since the start, ``seconds`` is the average time of
    service."""

    in_flight: int = 0
    queued: int = 0
    refused: int = 0
    seconds: float | None = None


class Admission:
    """All places of one gateway; of one event loop."""

    def __init__(self) -> None:
        self._loads = defaultdict[str, Load](Load)
        #: by key, only for its queue
        self._keys = defaultdict[str, Load](Load)
        self._semaphores: dict[tuple[str, int], asyncio.Semaphore] = {}

    def load(self, route: str) -> Load:
        """How full the route of that name is now."""
        return self._loads[route]

    async def enter(self, route: str, settings: RouteSettings, caller: Caller) -> Callable[[], None]:
        """Wait for a place on a route, and for one of the caller's own where its key is bounded.

        Returns:
            Releases the place; call it once.

        Raises:
            OverloadedError: too many wait already, or the wait took ``queue_seconds``; ``retry_after`` is an estimate.
        """
        load = self.load(route)
        deadline = asyncio.get_running_loop().time() + settings.queue_seconds
        held: list[asyncio.Semaphore] = []

        def free() -> None:
            for semaphore in held:
                semaphore.release()

        async def take(name: str, bound: int, queue: Load) -> None:
            semaphore = self._semaphores.setdefault((name, bound), asyncio.Semaphore(bound))

            def overloaded(why: str) -> OverloadedError:
                load.refused += 1
                estimate = (queue.queued + 1) * (load.seconds or 0.0) / bound
                retry_after = min(max(estimate, _SHORTEST_RETRY), _LONGEST_RETRY)
                return OverloadedError(f"{why}: come back in a while", retry_after=retry_after)

            if not semaphore.locked():
                await semaphore.acquire()
            elif queue.queued >= settings.max_queued:
                raise overloaded(f"{load.in_flight} requests are being served and {queue.queued} wait")
            else:
                queue.queued += 1
                try:
                    async with asyncio.timeout_at(deadline):
                        await semaphore.acquire()
                except TimeoutError:
                    raise overloaded(f"no place within {settings.queue_seconds:g} s") from None
                finally:
                    queue.queued -= 1
            held.append(semaphore)

        try:
            if caller.max_in_flight is not None:
                # first, so that a request that waits for its key takes no place of the route, nor of its queue
                await take(f"key {caller.key_id}", caller.max_in_flight, self._keys[caller.key_id])
            await take(f"route {route}", settings.max_in_flight, load)
        except BaseException:
            free()
            raise
        load.in_flight += 1
        started = time.monotonic()

        def release() -> None:
            load.in_flight -= 1
            seconds = time.monotonic() - started
            average = seconds if load.seconds is None else load.seconds
            load.seconds = average + _SMOOTHING * (seconds - average)
            free()

        return release


@dataclass(frozen=True, slots=True)
class Retryable:
    """How a retry of the request is recognised: by a ``key`` that holds its ``idempotency-key`` (``keyed``) or its
    ``digest`` (of path, body, ``x-swarm-`` headers, and those that name a session); ``again``: it says that it is
    one."""

    key: tuple[str, str, str]
    digest: str
    again: bool
    keyed: bool

    @classmethod
    def of(cls, incoming: Incoming, route: str) -> Retryable | None:
        """``None`` for a request whose retry could not be recognised."""
        headers = incoming.headers
        keyed = headers.get("idempotency-key")
        if SDK_RETRIES not in headers and not keyed:
            return None
        ours = sorted(
            (name, value) for name, value in headers.items() if name.startswith("x-swarm-") or name in AGENT_HEADERS
        )
        digest = hashlib.sha256(incoming.raw + repr((incoming.path, ours)).encode()).hexdigest()
        return cls(
            key=(route, incoming.caller.key_id, keyed or digest),
            digest=digest,
            again=is_sdk_retry(headers),
            keyed=bool(keyed),
        )


class RetryDedup:
    """All requests that a retry may join; of one event loop, an async context manager.

    Attributes:
        joined: how many requests joined another.
    """

    def __init__(self) -> None:
        #: the last request of each key, oldest first
        self._latest: dict[tuple[str, str, str], _Shared] = {}
        self._running: set[_Shared] = set()
        #: how many requests of a key were answered with an error and not asked again yet, and when that last changed
        self._errors = Latest[tuple[str, str, str], tuple[int, float]](_REMEMBERED_MOST)
        self.joined = 0

    def __len__(self) -> int:
        """How many are in flight."""
        return len(self._running)

    async def run(
        self,
        incoming: Incoming,
        route: str,
        produce: Callable[[], Awaitable[Outcome]],
        shares: Callable[[str], None] = lambda request_id: None,
    ) -> Outcome:
        """The outcome of ``produce()``, or of an earlier request that this one repeats.

        Args:
            produce: makes the outcome, its place included; it is cancelled when the last of its callers has left.
            shares: called with the id of the earlier request once it has the outcome.

        Raises:
            ConflictError: an ``idempotency-key`` came before with another body.
        """
        retry = Retryable.of(incoming, route)
        if retry is None:
            return await produce()
        errors = self._count_errors(retry.key, -1) if retry.again else 0
        earlier = self._latest.get(retry.key)
        if earlier is not None and earlier.joinable:
            if earlier.digest != retry.digest:
                raise ConflictError(
                    "this idempotency-key came with another request before: give each request its own",
                    code="idempotency_key_reused",
                )
            if retry.keyed or (retry.again and not errors):
                self.joined += 1
                logger.info("request %s joins an earlier one that it repeats", incoming.request_id)
                note(route=route, policy="joined")
                incoming.prospect.follow(earlier.prospect)
                with phase("join"):
                    outcome = await earlier.outcome_for(retry)
                incoming.left_out.add(earlier.left_out.lines)
                shares(earlier.request_id)
                return outcome
        shared = self._latest[retry.key] = _Shared(retry, incoming, produce, self._ended)
        self._running.add(shared)
        return await shared.outcome_for(retry)

    def _ended(self, shared: _Shared) -> None:
        self._running.discard(shared)
        if not shared.joinable:
            self._forget(shared)
            if shared.failed:
                self._count_errors(shared.key, 1)
            return
        shared.expiry = asyncio.get_running_loop().call_later(_REMEMBERED_SECONDS, self._forget, shared)
        for oldest in [shared for shared in self._latest.values() if shared not in self._running][:-_REMEMBERED_MOST]:
            self._forget(oldest)

    def _count_errors(self, key: tuple[str, str, str], more: int) -> int:
        """Add ``more`` to the errors of ``key``; how many there were that may still be asked again."""
        now = asyncio.get_running_loop().time()
        errors, changed = self._errors.pop(key, (0, now))
        errors = errors if now - changed < _LATEST_RETRY else 0
        if errors + more > 0:
            self._errors[key] = errors + more, now
        return errors

    def _forget(self, shared: _Shared) -> None:
        if shared.expiry is not None:
            # so that the timer does not keep its stream
            shared.expiry.cancel()
        if self._latest.get(shared.key) is shared:
            del self._latest[shared.key]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._latest.clear()
        if running := [shared.cancel() for shared in self._running]:
            await asyncio.wait(running)


class _Shared:
    """One request's work, in its own task, and the callers who wait for it.

    The parts of a stream are kept, so that each caller reads it from the beginning.

    Attributes:
        request_id, prospect: of the request.
        left_out: of the request, for the answers of all callers.
        joinable: it was neither given up nor answered with an error.
        failed: it was answered with an error alone.
        expiry: forgets it, once it has ended.
    """

    def __init__(
        self,
        retry: Retryable,
        incoming: Incoming,
        produce: Callable[[], Awaitable[Outcome]],
        ended: Callable[[_Shared], None],
    ) -> None:
        self.key, self.digest = retry.key, retry.digest
        self.request_id, self.prospect, self.left_out = incoming.request_id, incoming.prospect, incoming.left_out
        self.joinable = True
        self.failed = False
        self.expiry: asyncio.TimerHandle | None = None
        self._ended = ended
        self._callers = 0
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._parts: list[Any] = []
        #: whether the stream has ended
        self._read = False
        self._error: Exception | None = None
        #: at each part, at the stream's end, and when the last caller leaves
        self._change = Signal()
        self._grace: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._work(produce), name="answering a request that may be retried")
        # a callback, because a task that is cancelled before its first step runs none of its own code
        self._task.add_done_callback(self._over)

    def cancel(self) -> asyncio.Task[None]:
        """End the work; nobody can join it from now on."""
        self.joinable = False
        self._task.cancel()
        return self._task

    async def outcome_for(self, retry: Retryable) -> Outcome:
        """The outcome for one more caller, who leaves by being cancelled or by closing it."""
        self._callers += 1
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        here = True

        async def close() -> None:
            nonlocal here
            if here:
                here = False
                self._left(keyed=retry.keyed)

        try:
            outcome = await asyncio.shield(self._outcome)
        except BaseException:
            await close()
            raise
        if isinstance(outcome, Live):
            return replace(outcome, chunks=self._replay(), close=close)
        if isinstance(outcome, Relayed) and not isinstance(outcome.body, bytes):
            return replace(outcome, body=self._replay(), close=close)
        return replace(outcome, close=close)

    def _left(self, *, keyed: bool) -> None:
        self._callers -= 1
        if self._callers or self._task.done():
            return
        if self._outcome.done() and self._read:
            self._change.notify()
        elif keyed:
            self._grace = asyncio.get_running_loop().call_later(_KEYED_GRACE, self.cancel)
        else:
            self.cancel()

    async def _work(self, produce: Callable[[], Awaitable[Outcome]]) -> None:
        outcome = await produce()
        try:
            self.failed = isinstance(outcome, Relayed) and outcome.status >= 400
            self.joinable = not self.failed
            stream = stream_of(outcome)
            self._read = stream is None
            self._outcome.set_result(outcome)
            if stream is not None:
                await self._read_on(stream)
            while self._callers:
                await self._change.wait()
        finally:
            if outcome.close is not None:
                await outcome.close()

    async def _read_on(self, stream: AsyncIterator[Any]) -> None:
        try:
            async for part in stream:
                self._parts.append(part)
                if len(self._parts) == _MOST_PARTS:
                    self.joinable = False
                self._change.notify()
        except Exception as exc:
            self._error, self.joinable = exc, False
        except BaseException:
            self._error = _stopped()
            raise
        finally:
            self._read = True
            self._change.notify()

    async def _replay(self) -> AsyncGenerator[Any]:
        """The parts of the stream in order, then its error, if it has one."""
        position = 0
        while position < len(self._parts) or not self._read:
            if position < len(self._parts):
                yield self._parts[position]
                position += 1
            else:
                await self._change.wait()
        if self._error is not None:
            raise self._error

    def _over(self, task: asyncio.Task[None]) -> None:
        if self._grace is not None:
            self._grace.cancel()
        error = _stopped() if task.cancelled() else task.exception()
        if error is not None:
            self.joinable = False
            if not self._outcome.done():
                self.failed = not task.cancelled()
                self._outcome.set_exception(error)
                # marked as retrieved: there may be no caller left
                self._outcome.exception()
            elif not task.cancelled():
                logger.error("closing an answer failed", exc_info=error)
        self._ended(self)


def _stopped() -> UnavailableError:
    return UnavailableError("the answer was given up: the gateway stops", retry_after=1.0)
