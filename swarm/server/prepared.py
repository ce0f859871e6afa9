"""Ends that several servers share, all or none: two phases, of which the first participant's commit is the decision.

Invariant: once a participant has said that it is prepared, only the coordinator's decision ends its episodes; what was
decided is on disk before anybody is told, and is carried out again after a restart until it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary

import httpx

from swarm.errors import ConflictError, NotFoundError, RequestError, SwarmGatewayError, UnavailableError
from swarm.protocol import GroupEndDecision, PreparedGroupEnd, PrepareGroupEndRequest
from swarm.server.config import ServerConfig
from swarm.server.controller import Controller
from swarm.server.prepared_store import PreparedStore, State, StoredEnd

logger = logging.getLogger(__name__)

#: in the run folder
STORE_NAME = "group_ends.db"
#: Seconds between two questions to a coordinator that does not say, at first and at most.
_ASK_FIRST, _ASK_MOST = 1.0, 30.0
_ASK_TIMEOUT = 5.0

Decision = Literal["pending", "committed", "cancelled"]


@dataclass
class _Prepared:
    """A transaction that is prepared and undecided; times are monotonic seconds."""

    wanted: PrepareGroupEndRequest
    due: float
    pause: float = _ASK_FIRST
    doubt: str = ""

    @property
    def uuids(self) -> list[str]:
        return [end.episode_uuid for end in self.wanted.ends]


@dataclass
class PreparedGroups:
    """The transactions of one server.

    Args:
        config: ``peers`` are whom it asks, ``run_dir`` is where the store lies.
        transport: replaces the network towards peers, for tests.
    """

    config: ServerConfig
    controller: Controller
    transport: httpx.AsyncBaseTransport | None = None
    _open: PreparedStore | None = None
    _prepared: dict[str, _Prepared] = field(default_factory=dict[str, _Prepared])
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary[str, asyncio.Lock])

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Take up what the store holds, and watch over it inside the block; the controller is open before.

        Raises:
            ConfigError: the store cannot be read.
        """
        self._open = PreparedStore(Path(self.config.run_dir) / STORE_NAME)
        try:
            await self._recover()
            watching = asyncio.create_task(self._watch(), name="prepared-group-ends")
            try:
                yield
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        finally:
            self._open.close()

    # ------------------------------------------------------------------ what callers ask

    async def prepare(self, wanted: PrepareGroupEndRequest) -> None:
        """Promise the end, or refuse it.

        Raises:
            ConflictError: it would not be trained (``group_not_trained``), it was cancelled before
                (``group_end_cancelled``), the name is that of another end, or an episode is over.
            NotFoundError: an episode is unknown or another client's.
        """
        async with self._locked(wanted.transaction):
            stored = await self._get(wanted.transaction)
            if stored is not None:
                if stored.state == "cancelled":
                    raise _cancelled(wanted.transaction)
                if stored.wanted != wanted:
                    raise ConflictError(f"transaction {wanted.transaction} is another end", code="other_transaction")
                return
            reason = self.controller.pool.promise(wanted.client_uuid, wanted.task_id, wanted.ends, wanted.transaction)
            if reason:
                raise ConflictError(f"it would not be trained: {reason}", code="group_not_trained")
            # first of all: should the disk fail, and nobody come back, the episodes go free with time
            self._watch_over(wanted, wanted.hold_seconds)
            # what the promise rests on, claims and calls, must survive as long as the promise
            await self.controller.synced()
            await self._put(wanted.transaction, wanted.client_uuid, "prepared", wanted)

    async def commit(self, client_uuid: str, transaction: str) -> str:
        """Carry the end out; returns why it is not trained although it was promised, or an empty string.

        Raises:
            NotFoundError: it was never prepared here, or by another client.
            ConflictError: it was cancelled, or another training run has begun meanwhile.
        """
        async with self._locked(transaction):
            stored = await self._mine(client_uuid, transaction)
            if stored.state == "cancelled":
                raise _cancelled(transaction)
            assert stored.wanted is not None
            return await self._commit(stored.wanted, stored.state)

    async def cancel(self, client_uuid: str, transaction: str) -> None:
        """Give the end up, and its episodes with it; also one that has not been prepared yet, and then never will.

        Raises:
            ConflictError: it was committed.
        """
        async with self._locked(transaction):
            stored = await self._get(transaction)
            if stored is not None and stored.client_uuid != client_uuid:
                raise _unknown(transaction)
            if stored is not None and stored.state in ("committed", "applied"):
                raise ConflictError(f"transaction {transaction} was committed", code="group_end_committed")
            await self._cancel(transaction, client_uuid, stored)

    async def decision(self, transaction: str) -> Decision:
        """What was decided here; changes nothing.

        A transaction that is unknown counts as cancelled: its other participants are asked to promise only after this
        one has, so those who may ask have nothing to fear from a promise that is still on its way here.
        """
        async with self._locked(transaction):
            stored = await self._get(transaction)
            if stored is None:
                return "pending" if transaction in self._prepared else "cancelled"
            if stored.state == "prepared":
                return "pending"
            return "cancelled" if stored.state == "cancelled" else "committed"

    def undecided(self) -> list[PreparedGroupEnd]:
        """What is prepared and not decided, oldest first."""
        now = time.monotonic()
        return [
            PreparedGroupEnd(
                transaction=name,
                client_uuid=one.wanted.client_uuid,
                task_id=one.wanted.task_id,
                episodes=len(one.wanted.ends),
                coordinator=one.wanted.coordinator,
                seconds_left=max(0.0, one.due - now) if not one.doubt else 0.0,
                in_doubt=one.doubt,
            )
            for name, one in self._prepared.items()
        ]

    # ------------------------------------------------------------------ deciding

    async def _commit(self, wanted: PrepareGroupEndRequest, state: State) -> str:
        name = wanted.transaction
        if state == "prepared":
            await self._check_promise(wanted)
            await self._put(name, wanted.client_uuid, "committed", wanted)
            self._prepared.pop(name, None)
        dropped = await self.controller.end(
            wanted.client_uuid, wanted.task_id, wanted.ends, as_group=True, end_key=name
        )
        if state != "applied":
            await self._put(name, wanted.client_uuid, "applied", wanted)
        return dropped

    async def _check_promise(self, wanted: PrepareGroupEndRequest) -> None:
        """Cancel instead of committing what another training run has taken away meanwhile."""
        try:
            self.controller.pool.promise(wanted.client_uuid, wanted.task_id, wanted.ends, wanted.transaction)
        except RequestError:
            stored = StoredEnd(wanted.client_uuid, "prepared", wanted, time.time())
            await self._cancel(wanted.transaction, wanted.client_uuid, stored)
            raise

    async def _cancel(self, name: str, client_uuid: str, stored: StoredEnd | None) -> None:
        undecided = self._prepared.get(name)
        wanted = stored.wanted if stored is not None else undecided.wanted if undecided is not None else None
        if stored is None or stored.state == "prepared":
            await self._put(name, client_uuid, "cancelled", wanted)
        self._prepared.pop(name, None)
        if wanted is not None:
            self._let_go(wanted)
            await self.controller.synced()

    def _let_go(self, wanted: PrepareGroupEndRequest) -> None:
        if self.controller.has_job:
            self.controller.pool.break_promise([end.episode_uuid for end in wanted.ends], wanted.transaction)
            self.controller.pool_changed()

    # ------------------------------------------------------------------ watching

    async def _recover(self) -> None:
        for name, stored in (await asyncio.to_thread(self._store.unfinished)).items():
            wanted = stored.wanted
            if wanted is None or not self.controller.has_job:
                continue
            try:
                if stored.state == "committed":
                    await self._commit(wanted, "committed")
                    continue
                self.controller.pool.promise(wanted.client_uuid, wanted.task_id, wanted.ends, name)
            except RequestError as exc:
                logger.error("group end %s, %s before the restart, is lost: %s", name, stored.state, exc.message)
                if stored.state == "committed":
                    await self._put(name, wanted.client_uuid, "applied", wanted)
                    continue
            self._watch_over(wanted, stored.changed_at + wanted.hold_seconds - time.time())

    def _watch_over(self, wanted: PrepareGroupEndRequest, seconds: float) -> None:
        self._prepared[wanted.transaction] = _Prepared(wanted, time.monotonic() + min(seconds, wanted.hold_seconds))
        self._changed.set()

    async def _watch(self) -> None:
        async with httpx.AsyncClient(transport=self.transport, trust_env=False, timeout=_ASK_TIMEOUT) as peers:
            while True:
                self._changed.clear()
                due = min((one.due for one in self._prepared.values()), default=None)
                pause = None if due is None else max(0.0, due - time.monotonic())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._changed.wait()
                now = time.monotonic()
                overdue = [name for name, one in self._prepared.items() if one.due <= now]
                await asyncio.gather(*(self._settle(name, peers) for name in overdue))

    async def _settle(self, name: str, peers: httpx.AsyncClient) -> None:
        """The time of a prepared end is over: decide, or find out what was decided."""
        one = self._prepared.get(name)
        if one is None:
            return
        try:
            decision = await self._ask(one.wanted, peers) if one.wanted.coordinator else "cancelled"
            if decision == "pending":
                raise UnavailableError("it has not decided yet")
            async with self._locked(name):
                stored = await self._get(name)
                if stored is not None and stored.state != "prepared":
                    self._prepared.pop(name, None)
                    return
                if decision == "committed":
                    await self._commit(one.wanted, "prepared")
                else:
                    logger.warning("group end %s is cancelled: nobody committed it in time", name)
                    await self._cancel(name, one.wanted.client_uuid, stored)
        except SwarmGatewayError as exc:
            if not one.doubt:
                logger.error("group end %s is in doubt: %s says: %s", name, one.wanted.coordinator, exc.message)
            one.doubt = exc.message
            one.due = time.monotonic() + one.pause * random.uniform(0.5, 1.0)
            one.pause = min(one.pause * 2, _ASK_MOST)

    async def _ask(self, wanted: PrepareGroupEndRequest, peers: httpx.AsyncClient) -> Decision:
        known = {url.rstrip("/"): token for url, token in self.config.peers.items()}
        token = known.get(wanted.coordinator.rstrip("/"))
        if token is None:
            raise UnavailableError(f"{wanted.coordinator} is not among this server's `peers`: add it, or cancel")
        try:
            answer = await peers.get(
                f"{wanted.coordinator.rstrip('/')}/group_end_decision",
                params={"transaction": wanted.transaction},
                headers={"authorization": f"Bearer {token}"} if token else {},
            )
            answer.raise_for_status()
            return GroupEndDecision.model_validate_json(answer.content).decision
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:  # whatever a peer is called, and answers
            raise UnavailableError(f"{type(exc).__name__}: {exc}") from exc

    # ------------------------------------------------------------------ the store

    @property
    def _store(self) -> PreparedStore:
        assert self._open is not None, "running() comes first"
        return self._open

    def _locked(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _get(self, name: str) -> StoredEnd | None:
        return await asyncio.to_thread(self._store.get, name)

    async def _mine(self, client_uuid: str, name: str) -> StoredEnd:
        stored = await self._get(name)
        if stored is None or (stored.client_uuid != client_uuid and stored.state != "cancelled"):
            raise _unknown(name)
        return stored

    async def _put(self, name: str, client_uuid: str, state: State, wanted: PrepareGroupEndRequest | None) -> None:
        # not to be cancelled half-way: whoever repeats the call must find what the disk has
        await asyncio.shield(asyncio.to_thread(self._store.put, name, client_uuid, state, wanted))


def _unknown(transaction: str) -> NotFoundError:
    return NotFoundError(f"transaction {transaction} is not prepared here, or not yours", code="group_end_unknown")


def _cancelled(transaction: str) -> ConflictError:
    return ConflictError(f"transaction {transaction} was cancelled", code="group_end_cancelled")
