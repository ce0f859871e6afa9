"""Which of vLLM's replicas serves which call: the one that has the prefix, among those that can be reached.

Invariant: an episode stays on its replica while that can be reached; a replica that cannot gets no call until it has
answered ``GET /health`` again.

New episodes are placed by consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA
2018, arXiv:1608.01350): in an order that only the beginning of the prompt decides, the first replica whose load is
below ``1.25`` times the mean takes the call. So prompts that begin alike share one KV cache, and a popular beginning
overloads no replica. The order is that of rendezvous hashing (Thaler and Ravishankar, 1998): it needs no ring, and a
replica that comes or goes moves only its own prompts. A load is the number of answers that are being sampled.
"""

from __future__ import annotations

import asyncio
import logging
import random
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from adapters.dialects.jsons import encode
from swarm.concurrency import Signal
from swarm.server.dataplane.upstream import AbortedError, TransientError, UnreachableError
from swarm.status import ReplicaStatus

logger = logging.getLogger(__name__)

#: the paper's c = 1 + epsilon
_MOST_OF_MEAN = 1.25
#: The part of a raw prompt that counts, in characters or tokens.
_RAW_BEGINNING = 512
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


@dataclass(eq=False)
class Replica:
    """One vLLM server; ``address`` is ``host:port``."""

    address: str
    load: int = 0
    calls: int = 0
    failures: int = 0
    probe: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        return self.probe is None


class Replicas:
    """All replicas of the engine; :meth:`close` them.

    Args:
        is_healthy: whether the replica at an address answers a probe; called for those that are set aside.
    """

    def __init__(self, is_healthy: Callable[[str], Awaitable[bool]]) -> None:
        self._is_healthy = is_healthy
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
            self._replicas.setdefault(address, Replica(address))
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
        self, owners: Sequence[object], prefix: bytes, samples: int, avoid: Replica | None = None
    ) -> Replica:
        """The replica for a call of ``owners`` (an episode or all of a group); waits while all are set aside.

        Args:
            owners: they stay on the replica afterwards.
            prefix: the key that places new owners.
            samples: how many answers the call samples.
            avoid: the replica where the call has just failed; chosen only if there is no other.
        """
        while not (healthy := [replica for replica in self._replicas.values() if replica.healthy]):
            await self._changed.wait()
        others = [replica for replica in healthy if replica is not avoid] or healthy
        home = self._homes.get(owners[0])
        chosen = home if home in others else self._place(others, prefix, samples)
        for owner in owners:
            self._homes[owner] = chosen
        return chosen

    def set_aside(self, replica: Replica, reason: str) -> None:
        """Send no calls to ``replica`` until it answers a probe."""
        if replica.healthy and self._replicas.get(replica.address) is replica:
            logger.warning("replica %s is set aside: %s", replica.address, reason)
            replica.probe = asyncio.create_task(self._probe(replica), name=f"probe {replica.address}")

    async def close(self) -> None:
        """End the probes."""
        probes = [replica.probe for replica in self._replicas.values() if replica.probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    def _place(self, among: Sequence[Replica], prefix: bytes, samples: int) -> Replica:
        bound = _MOST_OF_MEAN * (sum(replica.load for replica in among) + samples) / len(among)
        ordered = sorted(among, key=lambda one: blake2b(one.address.encode(), key=prefix, digest_size=8).digest())
        # there always is one: the least loaded is at most at the mean
        return next(replica for replica in ordered if replica.load < bound)

    async def _probe(self, replica: Replica) -> None:
        pause = _FIRST_PAUSE
        while True:
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)
            if await self._is_healthy(replica.address):
                logger.info("replica %s answers again", replica.address)
                replica.probe = None
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
    """

    replicas: Replicas
    owners: Sequence[object]
    prefix: bytes
    addresses: Callable[[], Sequence[str]]
    _failed: Replica | None = field(default=None, init=False)

    @asynccontextmanager
    async def lease(self, samples: int) -> AsyncGenerator[str]:
        """The base URL for one attempt, which samples so many answers; its outcome decides where the next one goes.

        Raises:
            UnavailableError: no engine serves.
        """
        self.replicas.follow(self.addresses())
        replica = await self.replicas.choose(self.owners, self.prefix, samples, self._failed)
        replica.load += samples
        replica.calls += 1
        try:
            yield f"http://{replica.address}"
        except AbortedError:
            raise  # all replicas replace their weights
        except TransientError as exc:
            replica.failures += 1
            self._failed = replica
            if isinstance(exc, UnreachableError):
                self.replicas.set_aside(replica, exc.message)
            raise
        finally:
            replica.load -= samples


def prefix_of(body: Mapping[str, Any]) -> bytes:
    """A key of what the prompts of one session, and of all answers to one question, have in common.

    That is everything up to the first message of the user, which later turns only extend, or the beginning of a raw
    prompt.
    """
    if "prompt" in body:
        return blake2b(encode(body["prompt"][:_RAW_BEGINNING]), digest_size=16).digest()
    messages: list[Any] = body["messages"]
    first = next(
        (at for at, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user"),
        len(messages) - 1,
    )
    return blake2b(encode(messages[: first + 1]), digest_size=16).digest()
