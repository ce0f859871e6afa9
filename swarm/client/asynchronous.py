"""``AsyncSwarmClient``: whole groups of episodes for event loops, as the gateway uses them.

Invariant: a claim that the caller no longer waits for is handed back, and an abort once begun is carried through.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from swarm.client import wire
from swarm.client.flows import ABORT_POLICY, Flow, Flows, Pause
from swarm.client.policy import Outcome, Reply, RetryPolicy
from swarm.client.wire import EpisodeEndpoint
from swarm.errors import SwarmGatewayError
from swarm.protocol import EpisodeType, ServerStatus
from swarm.states import EngineState
from swarm.types import WorkflowOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that ``close`` gives to aborts still under way.
CLOSE_GRACE = 10.0


class AsyncSwarmClient:
    """Claims, ends and aborts episodes of one swarm server over pooled connections.

    Args:
        server_url: address of the swarm server, e.g. ``http://127.0.0.1:10086``.
        token: the server's token; default ``$SWARM_TOKEN``.
        client_uuid: name of this client towards the server; default a fresh one.
        request_timeout: seconds for one request (a claim: those it waits, and ten more).
        policy: when a request is repeated.
        transport: replaces the network, for tests.

    Raises:
        ConfigError: ``server_url`` is no http address.
    """

    def __init__(
        self,
        server_url: str,
        token: str | None = None,
        client_uuid: str | None = None,
        *,
        request_timeout: float = 30.0,
        policy: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._flows = Flows.of(server_url, token, client_uuid, request_timeout, policy)
        self._http = httpx.AsyncClient(
            transport=transport, limits=wire.LIMITS, trust_env=False, verify=wire.tls_context()
        )
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def client_uuid(self) -> str:
        """The name of this client towards the server."""
        return self._flows.client_uuid

    async def claim_group(
        self,
        count: int,
        wait_seconds: float = 0.0,
        *,
        episode_type: EpisodeType = "train",
        discard_episode_timeout: float = 240.0,
    ) -> list[EpisodeEndpoint]:
        """Claim ``count`` episodes at once or none, waiting up to ``wait_seconds`` for them.

        Raises:
            UnavailableError: no server, or no episodes in time; ``code`` says which (``server_unreachable``,
                ``engine_offline``, ``engine_booting``, ``engine_syncing``, ``engine_post_rolling``, ``no_episodes``).
                An engine that is OFFLINE is not waited for.
            RequestError: the server refuses the request itself (wrong token, count above its slots).
        """
        flow = self._flows.claim(count, wait_seconds, episode_type, discard_episode_timeout)
        abandoned = asyncio.Event()
        claiming = self._keep(self._run(flow, abandoned))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            # the server may be granting this very moment: let the poll finish and hand its episodes back
            abandoned.set()
            claiming.add_done_callback(self._hand_back)
            raise

    async def end_group(self, task_id: str, outputs: Mapping[str, WorkflowOutput]) -> str:
        """End all episodes of one task in one transition; ``outputs`` maps episode uuid to its result. Idempotent.

        Returns:
            Why the server will not train the group although it took the end, or an empty string.

        Raises:
            UnavailableError: no server within the policy's bound.
            RequestError: the server refuses, e.g. because an episode is no longer ours (``code`` says why).
        """
        answer = await self._run(self._flows.perform(wire.end_group_call(self.client_uuid, task_id, outputs)))
        return answer.error or ""

    async def abort(self, episode_uuids: Iterable[str]) -> None:
        """Give up episodes. Never raises: what cannot be told to the server falls to its idle timeout (logged).

        The calls go on in the background when the caller is cancelled meanwhile; :meth:`close` waits for them.
        """
        tasks = [self._keep(self._abort_one(uuid)) for uuid in episode_uuids]
        if tasks:
            await asyncio.wait(tasks)

    async def status(self) -> ServerStatus:
        """Everything the server tells about itself.

        Raises:
            UnavailableError: no server within the policy's bound.
        """
        return await self._run(self._flows.perform(wire.STATUS))

    async def wait_for_state(self, *states: EngineState, wait_seconds: float) -> ServerStatus:
        """Wait until the engine is in one of ``states``.

        Raises:
            EngineError: the engine is OFFLINE and that was not waited for; carries its reason and last lines.
            UnavailableError: the time is over.
        """
        return await self._run(self._flows.wait_for_state(states, wait_seconds))

    async def close(self) -> None:
        """Finish background aborts (bounded) and close the connections."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_GRACE
        # a claim handed back starts aborts of its own, so look again until nothing is left
        while self._background and (remaining := deadline - loop.time()) > 0:
            await asyncio.wait(self._background, timeout=remaining)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _abort_one(self, episode_uuid: str) -> None:
        call = wire.abort_call(self.client_uuid, episode_uuid)
        try:
            await self._run(self._flows.perform(call, policy=ABORT_POLICY))
        except SwarmGatewayError as exc:
            logger.warning("episode %s could not be aborted and falls to its idle timeout: %s", episode_uuid, exc)

    def _hand_back(self, claiming: asyncio.Task[list[EpisodeEndpoint]]) -> None:
        if claiming.cancelled() or claiming.exception() is not None:
            return
        for episode in claiming.result():
            self._keep(self._abort_one(episode.episode_uuid))

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        # the loop holds tasks weakly: without this set, work nobody waits for could vanish
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _run(self, flow: Flow[T], abandoned: asyncio.Event | None = None) -> T:
        outcome: Outcome | None = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as stop:
                return stop.value
            if abandoned is not None and abandoned.is_set():
                raise asyncio.CancelledError
            if isinstance(step, Pause):
                outcome = None
                await asyncio.sleep(step.seconds)
                continue
            try:
                answer = await self._http.request(
                    step.method, step.url, headers=step.headers, content=step.content, timeout=step.timeout
                )
                outcome = Reply(answer.status_code, dict(answer.headers), answer.content)
            except httpx.RequestError as exc:
                outcome = exc
