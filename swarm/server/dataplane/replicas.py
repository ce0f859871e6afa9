"""Which of vLLM's replicas serves which call: the one that has the prefix, among those that can be reached.

Invariant: an episode stays on its replica while that can be reached; a replica that cannot, or that died, gets no call
until it has answered ``GET /health`` again. A replica that fails a call and then does not answer ``GET /health`` has
died, of one of the calls that were in flight there, see :mod:`swarm.server.dataplane.suspects`.

New episodes are placed by consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA
2018, arXiv:1608.01350): in an order that only the beginning of the prompt decides, the first replica whose load is
below ``1.25`` times the mean takes the call. So prompts that begin alike share one KV cache, and a popular beginning
overloads no replica. The order is that of rendezvous hashing (Thaler and Ravishankar, 1998): it needs no ring, and a
replica that comes or goes moves only its own prompts. A load is the number of answers that are being sampled.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from adapters.dialects.jsons import encode
from swarm.concurrency import Signal, backoff, end_tasks
from swarm.errors import UnavailableError
from swarm.server.dataplane.replica_client import AbortedError, TransientError, UnreachableError, UpstreamRefusalError
from swarm.server.dataplane.suspects import Arrival, Door, Identity, Suspects
from swarm.status import ReplicaStatus

logger = logging.getLogger(__name__)

#: the paper's c = 1 + epsilon
_MOST_OF_MEAN = 1.25
#: The part of a raw prompt that counts, in characters or tokens.
_RAW_BEGINNING = 512
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
#: Wait of a call for a replica while none answers: an engine notices that sooner, unless its trainer computes.
_ALL_GONE_SECONDS = 15.0


@dataclass(eq=False)
class Replica:
    """One vLLM server; ``address`` is ``host:port``.

    Attributes:
        probe: asks whether it answers again.
        dead: it died, and has not answered since.
        inquest: finds out whether it died.
    """

    address: str
    door: Door
    load: int = 0
    calls: int = 0
    failures: int = 0
    probe: asyncio.Task[None] | None = None
    dead: bool = False
    inquest: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        return self.probe is None


class Replicas:
    """All replicas of the engine; :meth:`close` them.

    Args:
        is_healthy: whether the replica at an address answers a probe; called for those that are set aside, and for
            those that failed a call.
        suspects: learns of deaths, and holds back who may cause another.
    """

    def __init__(self, is_healthy: Callable[[str], Awaitable[bool]], suspects: Suspects | None = None) -> None:
        self._is_healthy = is_healthy
        self.suspects = Suspects() if suspects is None else suspects
        self._inquests: set[asyncio.Task[None]] = set()
        self._replicas: dict[str, Replica] = {}
        # weak keys: the entry of an episode goes with the episode
        self._homes: weakref.WeakKeyDictionary[Any, Replica] = weakref.WeakKeyDictionary()
        self._changed = Signal()

    def follow(self, addresses: Sequence[str]) -> None:
        """Make ``addresses`` the replicas; those that remain keep their episodes and counts."""
        if self._replicas.keys() == set(addresses):
            return
        for address in self._replicas.keys() - set(addresses):
            if (probe := self._replicas.pop(address).probe) is not None:
                probe.cancel()
        for address in addresses:
            if address not in self._replicas:
                self._replicas[address] = Replica(address, Door(self.suspects))
        self._changed.notify()

    def rows(self) -> list[ReplicaStatus]:
        """What is known of each replica, in the engine's order."""
        return [
            ReplicaStatus(
                address=replica.address,
                healthy=replica.healthy,
                in_flight=replica.load,
                calls=replica.calls,
                failures=replica.failures,
            )
            for replica in self._replicas.values()
        ]

    async def choose(
        self,
        owners: Sequence[object],
        prefix: bytes,
        samples: int,
        identity: Identity,
        avoid: Replica | None = None,
    ) -> tuple[Replica, Arrival]:
        """The replica for a call with so many ``samples`` of ``owners``, which stay there, and its arrival there, which
        is inside; waits while all are set aside, and while a suspect is sampled alone. The replica to ``avoid``, where
        the call has just failed, is chosen only if there is no other.

        Raises:
            FatalRequestError: the request is refused.
            UnavailableError: no replica has answered for :data:`_ALL_GONE_SECONDS`.
        """
        loop = asyncio.get_running_loop()
        waiting: tuple[Replica, Arrival] | None = None
        given_up: float | None = None
        try:
            while True:
                self.suspects.check(identity)
                chosen = self._chosen(owners, prefix, samples, avoid)
                if waiting is not None and waiting[0] is not chosen:
                    self.leave(*waiting)
                    waiting = None
                if chosen is None:
                    opens = given_up = given_up or loop.time() + _ALL_GONE_SECONDS
                    if loop.time() >= given_up:
                        raise UnavailableError("vLLM does not answer any more", code="engine_offline", retry_after=5.0)
                else:
                    given_up = None
                    waiting = waiting or (chosen, chosen.door.arrive(identity))
                    if chosen.door.admits(waiting[1], loop.time()):
                        for owner in owners:
                            self._homes[owner] = chosen
                        admitted, waiting = waiting, None
                        return admitted
                    opens = chosen.door.opens(loop.time())
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(opens):
                        await self._changed.wait()
        finally:
            if waiting is not None:
                self.leave(*waiting)

    def leave(self, replica: Replica, arrival: Arrival) -> None:
        """A call is over, or waits no more."""
        replica.door.leave(arrival)
        if self.suspects:
            self._changed.notify()

    def answered(self, identity: Identity) -> None:
        """The request has its answer: those who waited for a suspect look again once its call has left."""
        if self.suspects:
            self.suspects.cleared(identity)
            self._changed.notify()

    async def failed(self, replica: Replica, error: TransientError) -> None:
        """A call at ``replica`` failed; returns when it is known whether the replica died."""
        replica.failures += 1
        if isinstance(error, UnreachableError):
            self.set_aside(replica, error.message)
        elif not replica.dead:
            if replica.inquest is None:
                # now, while all that were in flight at its death still are
                work = self._find_out(replica, replica.door.inside(), error.message)
                replica.inquest = asyncio.create_task(work, name=f"inquest {replica.address}")
                self._inquests.add(replica.inquest)
                replica.inquest.add_done_callback(self._inquests.discard)
            await asyncio.shield(replica.inquest)

    async def _find_out(self, replica: Replica, in_flight: Collection[Identity], reason: str) -> None:
        try:
            if not await self._is_healthy(replica.address):
                replica.dead = True
                self.set_aside(replica, reason)
                self.suspects.died(in_flight)
                self._changed.notify()
        finally:
            replica.inquest = None

    def _chosen(self, owners: Sequence[object], prefix: bytes, samples: int, avoid: Replica | None) -> Replica | None:
        healthy = [replica for replica in self._replicas.values() if replica.healthy]
        among = [replica for replica in healthy if replica is not avoid] or healthy
        if not among:
            return None
        if (home := self._homes.get(owners[0])) in among:
            return home
        bound = _MOST_OF_MEAN * (sum(replica.load for replica in among) + samples) / len(among)
        ordered = sorted(
            among, key=lambda replica: blake2b(replica.address.encode(), key=prefix, digest_size=8).digest()
        )
        # there always is one: the least loaded is at most at the mean
        return next(replica for replica in ordered if replica.load < bound)

    def set_aside(self, replica: Replica, reason: str) -> None:
        """Send no calls to ``replica`` until it answers a probe."""
        if replica.healthy and self._replicas.get(replica.address) is replica:
            logger.warning("replica %s is set aside: %s", replica.address, reason)
            replica.probe = asyncio.create_task(self._probe(replica), name=f"probe {replica.address}")

    async def close(self) -> None:
        """End the probes and inquests."""
        probes = [replica.probe for replica in self._replicas.values() if replica.probe is not None]
        await end_tasks(*probes, *self._inquests)

    async def _probe(self, replica: Replica) -> None:
        for failures in itertools.count(1):
            await asyncio.sleep(backoff(failures, _FIRST_PAUSE, _LONGEST_PAUSE))
            if await self._is_healthy(replica.address):
                logger.info("replica %s answers again", replica.address)
                replica.probe, replica.dead = None, False
                self._changed.notify()
                return


@dataclass
class Placement:
    """The replica of each attempt of one call.

    Args:
        replicas: the engine's.
        owners: the episode, or all episodes of the group, that the call is for.
        prefix: :func:`prefix_of` the prompt.
        addresses: gives the replicas' addresses now; raises when no engine serves.
        identity: of the call's request.
        sampled: called after each attempt that vLLM has answered.
    """

    replicas: Replicas
    owners: Sequence[object]
    prefix: bytes
    addresses: Callable[[], Sequence[str]]
    identity: Identity
    sampled: Callable[[], None] = lambda: None
    _failed: Replica | None = field(default=None, init=False)

    @asynccontextmanager
    async def lease(self, samples: int) -> AsyncGenerator[str]:
        """The base URL for one attempt, which samples so many answers; its outcome decides where the next one goes.

        Raises:
            UnavailableError: no engine serves.
            FatalRequestError: engines die of the request.
        """
        replicas, identity = self.replicas, self.identity
        replicas.follow(self.addresses())
        replica, arrival = await replicas.choose(self.owners, self.prefix, samples, identity, self._failed)
        replica.load += samples
        replica.calls += 1
        try:
            yield f"http://{replica.address}"
        except AbortedError:
            raise  # all replicas replace their weights
        except TransientError as exc:
            self._failed = replica
            await replicas.failed(replica, exc)
            replicas.suspects.check(identity)
            raise
        except UpstreamRefusalError:
            replicas.answered(identity)
            raise
        else:
            replicas.answered(identity)
            self.sampled()
        finally:
            replica.load -= samples
            replicas.leave(replica, arrival)


def prefix_of(body: Mapping[str, Any]) -> bytes:
    """A key of what the prompts of one session, and of all answers to one question, have in common.

    That is everything up to the first message of the user, which later turns only extend, or the beginning of a raw
    prompt.
    """
    messages: Any = body.get("messages")
    if isinstance(messages, list):
        users = (
            at for at, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user"
        )
        beginning: Any = messages[: next(users, len(messages)) + 1]
    else:
        prompt: Any = body.get("prompt") or body.get("input")
        beginning = prompt[:_RAW_BEGINNING] if isinstance(prompt, str | list) else prompt
    return blake2b(encode(beginning), digest_size=16).digest()
