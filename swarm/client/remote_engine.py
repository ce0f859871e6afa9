"""The engine of a swarm server: read its state, wait for a state, start it, stop it, watch it.

Invariant: a change of the engine's state is learnt from a long poll that names the last change seen, so no change is
missed between two polls; and a command whose answer was lost is not taken for one that failed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import TextIO
from uuid import uuid4

from swarm.client import wire
from swarm.client.calls import Calls
from swarm.concurrency import end_tasks
from swarm.control_protocol import StartEngineResponse
from swarm.errors import ConflictError, EngineError, SwarmGatewayError, UnavailableError
from swarm.evidence.pairs import Pair
from swarm.evidence.ratings import SideRating
from swarm.judged_groups import JudgedGroups
from swarm.protocol import (
    LONG_POLL,
    AgreeSyncWeightRequest,
    BoolResponse,
    FollowedRoute,
    FollowStagesRequest,
    RecordPairRequest,
    RecordRatingRequest,
    StagesResponse,
    SuccessResponse,
)
from swarm.states import EngineState
from swarm.status import BufferedEpisode, EngineStatus, EpisodeBufferResponse, PoolInformation, ServerStatus
from swarm.subjects import DataReport, Subject

logger = logging.getLogger(__name__)

#: Seconds of one long poll of a watch.
WATCH_POLL = 30.0
#: Seconds for which a server may be away while its engine boots, which takes minutes: the line to it is down, say.
_AWAY_SECONDS = 60.0
#: Seconds that a start may take until the server has launched the engine's process.
_START_SECONDS = 60.0
#: Seconds that a look through all that a server keeps may take; groups with their tokens are tens of megabytes.
_DATA_SECONDS = 300.0
#: Tasks named in one report; a batch may have thousands.
_MAX_TASKS = 20


class RemoteEngine:
    """The engine of the server that ``calls`` reach; its methods are those of :class:`swarm.client.AsyncSwarmClient`.

    Attributes:
        boot_timeout: seconds that starting the engine may take.
        watches: call the callbacks of :meth:`add_entering_weight_sync_callback`.
    """

    def __init__(self, calls: Calls, boot_timeout: float) -> None:
        self.boot_timeout = boot_timeout
        self._calls = calls
        self.watches: list[asyncio.Task[None]] = []

    async def get_engine_status(self) -> EngineStatus:
        """State of the engine."""
        return await self._calls.perform(wire.ENGINE_STATUS)

    async def get_global_step(self) -> int:
        """How many training steps are complete."""
        return (await self.get_engine_status()).global_step

    async def get_rollout_stat(self) -> PoolInformation:
        """What the current batch has collected and still needs; asks a route of AgentJet's, as the next two do."""
        return await self._calls.perform(
            wire.Call("GET", "/get_current_batch_rollout_pool_information", PoolInformation)
        )

    async def print_rollout_stat(self, file: TextIO | None = None) -> None:
        """Print :meth:`get_rollout_stat` to ``file`` (default stdout)."""
        print("\n".join(_rollout_lines(await self.get_rollout_stat())), file=file or sys.stdout)

    async def get_episode_buffer(self) -> list[BufferedEpisode]:
        """The episodes that run now."""
        return (await self._calls.perform(wire.Call("POST", "/get_episode_buffer", EpisodeBufferResponse))).buffer

    async def judged_groups(self, **query: str | float | bool) -> JudgedGroups:
        """The latest groups and what became of them; ``query`` as of ``GET /judged_groups``. Needs the admin scope."""
        sent = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in query.items()}
        call = wire.Call("GET", "/judged_groups", JudgedGroups, timeout=_DATA_SECONDS, query=sent)
        return await self._calls.perform(call)

    async def data_report(self, subject: Subject) -> DataReport:
        """What there is of ``subject``, and which policy versions learned from it. Needs the admin scope, as the next
        two."""
        return await self._data("GET", "report", DataReport, subject)

    async def data_delete(self, subject: Subject) -> DataReport:
        """Delete it; returns what there was."""
        return await self._data("POST", "delete", DataReport, subject)

    async def data_export(self, subject: Subject) -> bytes:
        """Its episodes as JSON lines."""
        return (await self._data("GET", "export", wire.Content, subject)).content

    async def _data(self, method: str, what: str, answer: type[wire.AnswerT], subject: Subject) -> wire.AnswerT:
        query = dict[str, str | int | float](subject.names())
        return await self._calls.perform(wire.Call(method, f"/data/{what}", answer, timeout=_DATA_SECONDS, query=query))

    async def record_pair(self, pair: Pair) -> None:
        """Record what a challenger's group and an incumbent did with one request, where no end takes it along; a
        repetition changes nothing. Raises as :meth:`swarm.client.AsyncSwarmClient.end_group`."""
        body = wire.checked(RecordPairRequest, {"client_uuid": self._calls.client_uuid, "pair": pair})
        await self._calls.perform(wire.Call("POST", "/record_pair", SuccessResponse, body))

    async def record_rating(self, rating: SideRating) -> None:
        """Record what a user said of one side's answer; a later rating of the answer replaces it. Raises as
        :meth:`record_pair`."""
        body = wire.checked(RecordRatingRequest, {"client_uuid": self._calls.client_uuid, "rating": rating})
        await self._calls.perform(wire.Call("POST", "/record_rating", SuccessResponse, body))

    async def follow_stages(
        self, routes: Sequence[FollowedRoute], after_change: int | None, wait_seconds: float
    ) -> StagesResponse:
        """The stages once they have changed since ``after_change``, or after ``wait_seconds``; one attempt.

        Raises:
            UnavailableError: no server.
            ConflictError: it has no job yet.
        """
        fields = {"client_uuid": self._calls.client_uuid, "after_change": after_change, "wait_seconds": wait_seconds}
        body = wire.checked(FollowStagesRequest, fields | {"routes": [route.model_dump() for route in routes]})
        call = wire.Call("POST", "/follow_stages", StagesResponse, body, wait_seconds + wire.WAIT_GRACE)
        return await self._calls.perform(call, deadline=monotonic() + wait_seconds)

    async def wait_for_state(self, *states: EngineState, wait_seconds: float) -> ServerStatus:
        """Wait until the engine is in one of ``states``; one that lasts less than a round trip may be missed. A server
        that has answered may be away for a minute.

        Raises:
            EngineError: the engine is OFFLINE and that is not among ``states``; carries its reason and last lines, and
                the code ``wrong_config`` where the job is at fault.
            UnavailableError: the time is over, or no server answers.
        """
        deadline = monotonic() + wait_seconds
        logged = ""
        change: int | None = None
        answered: float | None = None
        early = 0
        while True:
            began = monotonic()
            poll = min(LONG_POLL, max(0.0, deadline - began))
            try:
                status = await self._calls.perform(wire.wait_status_call(change, poll), deadline=max(deadline, began))
            except UnavailableError as exc:
                # nobody knows the address of a server that never answered to be right
                if answered is None or monotonic() > min(deadline, answered + _AWAY_SECONDS):
                    raise
                logger.warning("the engine's state is unknown: %s", exc.message)
                await self._calls.pause(self._calls.policy.cap)
                continue
            answered = monotonic()
            engine = status.engine
            doing = " ".join(filter(None, (engine.engine_status, status.boot_stage, engine.engine_status_detail)))
            if doing != logged:
                logger.info("swarm server %s: %s", self._calls.server_url, doing)
                logged = doing
            if engine.engine_status in states:
                return status
            if engine.engine_status is EngineState.OFFLINE:
                failure = status.engine_failure
                raise EngineError(
                    "\n".join([f"the engine is offline: {doing}", *status.last_lines]),
                    code="wrong_config" if failure and failure.wrong_config else None,
                )
            now = monotonic()
            if now >= deadline:
                message = f"the engine is not {' or '.join(states)} after {wait_seconds:g} s: {doing}"
                raise UnavailableError(message, code="not_ready")
            changed = status.engine_changes is not None and status.engine_changes != change
            change = status.engine_changes
            early = early + 1 if not changed and now - began < poll / 2 else 0
            await self._calls.pause_between_polls(early, deadline - now)

    async def agree_sync_weight(self) -> BoolResponse:
        """Tell the server that this client has no more for the current batch (the ``..._agree_sync_weight`` collection
        methods); the answer says whether that counts."""
        body = AgreeSyncWeightRequest(client_uuid=self._calls.client_uuid, idempotency_key=uuid4().hex)
        return await self._calls.perform(wire.Call("POST", "/agree_sync_weight", BoolResponse, body))

    async def start_engine(self, wait: bool = True) -> int | None:
        """Start the engine and, by default, ``wait`` until it is ROLLING; returns its process id.

        Raises:
            RequestError: no job was synced, or it runs already.
            EngineError: it died while booting; carries its reason and last lines.
            UnavailableError: not ROLLING within ``boot_timeout``.
        """
        call = wire.Call("POST", "/start_engine", StartEngineResponse, timeout=_START_SECONDS)
        retries: list[None] = []
        try:
            pid = (await self._calls.perform(call, on_retry=lambda: retries.append(None))).pid
        except ConflictError:
            # if the answer to a start was lost, its retry finds the engine that it started
            status = await self._calls.status() if retries else None
            if status is None or status.engine.engine_status is EngineState.OFFLINE:
                raise
            pid = status.engine_pid
        if wait:
            await self.wait_for_state(EngineState.ROLLING, wait_seconds=self.boot_timeout)
        return pid

    async def stop_engine(self) -> None:
        """Stop the engine from any state."""
        await self._calls.perform(wire.STOP_ENGINE)

    async def add_entering_weight_sync_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once for each time that the engine begins to sync weights, even if the sync is over before
        the client learns of it, and await what it returns if that is awaitable; from a task of the client's that ends
        with it.

        Raises:
            UnavailableError: no server within the policy's bound.
        """
        first = await self._calls.perform(wire.wait_status_call(None, 0.0))
        syncs = first.weight_syncs

        async def observe(status: ServerStatus) -> None:
            nonlocal syncs
            # the count of a restarted server is smaller
            entries = status.weight_syncs - (syncs if status.weight_syncs >= syncs else 0)
            syncs = status.weight_syncs
            for _ in range(entries):
                try:
                    result = callback()
                    if inspect.isawaitable(result):
                        await result
                except Exception:
                    logger.exception("a callback for the weight sync failed")

        self.watches.append(asyncio.create_task(self.watch(observe, first)))

    @asynccontextmanager
    async def watching_status(
        self, on_status: Callable[[ServerStatus], Awaitable[object]]
    ) -> AsyncGenerator[ServerStatus]:
        """Yield the current status; inside the block, call ``on_status`` with the status after each change of the
        engine's state.

        Raises:
            UnavailableError: no server within the policy's bound.
        """
        first = await self._calls.perform(wire.wait_status_call(None, 0.0))
        watching = asyncio.create_task(self.watch(on_status, first))
        try:
            yield first
        finally:
            await end_tasks(watching)

    async def watch(
        self, on_status: Callable[[ServerStatus], Awaitable[object]], first: ServerStatus | None = None
    ) -> None:
        """Call ``on_status`` with each status after a change of the engine's state since ``first`` (``None``: with that
        of now, too), until cancelled. A server that is away, or refuses the token, is waited for."""
        calls, change = self._calls, None if first is None else first.engine_changes
        early, trouble = 0, ""
        while True:
            began = monotonic()
            try:
                status = await calls.perform(wire.wait_status_call(change, WATCH_POLL))
            except SwarmGatewayError as exc:
                # a message says how many seconds the call was tried
                if exc.code != trouble:
                    logger.warning("the engine's state is unknown: %s", exc.message)
                early, trouble = early + 1, exc.code
            else:
                trouble = ""
                answered_early = monotonic() - began < WATCH_POLL / 2
                if status.engine_changes is None or status.engine_changes != change:
                    try:
                        await on_status(status)
                    except Exception:
                        logger.exception("a callback for the engine's state failed")
                early = early + 1 if answered_early and status.engine_changes == change else 0
                change = status.engine_changes
            await calls.pause_between_polls(early, calls.policy.cap)


def _rollout_lines(pool: PoolInformation) -> list[str]:
    wanted = pool.batch_size * pool.num_repeat
    running = f"{pool.running_episodes} of {pool.slots} slots run"
    lines = [
        "current batch",
        f"  tasks     {pool.completed_tasks} of {pool.batch_size} complete, with {pool.num_repeat} episodes each",
        f"  episodes  {pool.completed_episodes} of {wanted} finished, {running}",
        f"  lost      {pool.quarantined_episodes} quarantined, {pool.dropped_episodes} dropped",
    ]
    shown = list(pool.tasks.items())[:_MAX_TASKS]
    if shown:
        more = f" and {len(pool.tasks) - _MAX_TASKS} more" if len(pool.tasks) > _MAX_TASKS else ""
        lines.append("  by task   " + ", ".join(f"{task}: {count}" for task, count in shown) + more)
    return lines
