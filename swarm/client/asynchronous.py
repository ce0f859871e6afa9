"""``AsyncSwarmClient``: the swarm server for event loops, as the gateway uses it.

Invariant: a claim that the caller no longer waits for is handed back, an abort once begun is carried through, and
nothing of the client is left once closed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from swarm.client import wire
from swarm.client.child import ServerChild
from swarm.client.claiming import Claim, claim
from swarm.client.control import AsyncEngineControl
from swarm.client.episodes import OpenEpisodes, sweep_async
from swarm.client.flows import Flow, Flows
from swarm.client.handles import AsyncEpisode, AsyncGroup, task_id_of
from swarm.client.pending_releases import ReleaseCall
from swarm.client.policy import RetryPolicy
from swarm.client.retrying import attempts_of
from swarm.client.throttle import Throttle
from swarm.client.transport import AsyncDriver, AsyncSender, HttpxSender
from swarm.client.watching import WeightSyncCallbacks, follow
from swarm.client.wire import EpisodeEndpoint, EpisodeGroup
from swarm.errors import StateError
from swarm.job import TrainJob
from swarm.protocol import EpisodeType, ServerStatus
from swarm.types import Task, WorkflowOutput

T = TypeVar("T")
ItemT = TypeVar("ItemT")

#: Seconds that ``close`` gives to aborts still under way.
CLOSE_GRACE = 10.0


class AsyncSwarmClient(AsyncEngineControl):
    """Runs episodes and controls the engine of one swarm server; the twin of :class:`swarm.client.SwarmClient`.

    Args:
        server_url: address of the swarm server, e.g. ``http://127.0.0.1:10086``.
        token: the server's token; default ``$SWARM_TOKEN``.
        client_uuid: name of this client towards the server; default a fresh one.
        request_timeout: seconds for one request (a claim: those it waits, and ten more).
        begin_timeout: seconds that :meth:`begin_episode` waits for a free episode: longer than a training step.
        boot_timeout: seconds that starting an engine may take.
        policy: when a request is repeated.
        auto_start_swarm_server: if nothing answers at a loopback address, ``async with`` starts a server there, which
            is stopped at close.
        transport: replaces the network, for tests; or what carries out the requests instead of httpx, closed with the
            client.

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
        begin_timeout: float = 1800.0,
        boot_timeout: float = 1800.0,
        policy: RetryPolicy | None = None,
        auto_start_swarm_server: bool = False,
        transport: httpx.AsyncBaseTransport | AsyncSender | None = None,
    ) -> None:
        super().__init__(Flows.of(server_url, token, client_uuid, request_timeout, policy), boot_timeout)
        self._begin_timeout = begin_timeout
        self._auto_start = auto_start_swarm_server
        self._child: ServerChild | None = None
        self._driver = AsyncDriver(
            HttpxSender(transport)
            if transport is None or isinstance(transport, httpx.AsyncBaseTransport)
            else transport
        )
        self._open = OpenEpisodes()
        self._background: set[asyncio.Task[Any]] = set()
        self._watching = asyncio.Lock()
        self._watch: tuple[asyncio.Task[None], WeightSyncCallbacks] | None = None

    # -- episodes

    async def begin_episode(
        self,
        discard_episode_timeout: float = 240.0,
        episode_type: EpisodeType = "train",
        throttle_policy: Throttle | None = None,
        *,
        max_episode_seconds: float | None = None,
        idempotency_key: str | None = None,
    ) -> tuple[str, EpisodeEndpoint]:
        """Claim an episode, waiting while none is free or the weights are being synced.

        Args:
            discard_episode_timeout: seconds without a model call after which the server takes the episode back.
            episode_type: ``"eval"`` episodes are never trained on.
            throttle_policy: this client's share of each batch; a :class:`ThrottleSchedule` follows the training step.
            max_episode_seconds: wall clock from claim to end; default eight times ``discard_episode_timeout``.
            idempotency_key: to get the episode of an earlier claim again; default a fresh one.

        Returns:
            The episode's uuid and where it samples (``base_url``, ``api_key``, ``episode_uuid``).

        Raises:
            UnavailableError: no server, an engine that is OFFLINE, or nothing free within ``begin_timeout``.
        """
        [endpoint] = await self._claim(
            Claim(
                None,
                self._begin_timeout,
                episode_type,
                discard_episode_timeout,
                max_episode_seconds,
                throttle_policy,
                idempotency_key,
            )
        )
        return endpoint.episode_uuid, endpoint

    async def end_episode(self, task: Task | str, episode_uuid: str, workflow_output: WorkflowOutput) -> str:
        """Hand in the result of an episode; repeating it changes nothing.

        Returns:
            Why the server will not train the episode although it took the end, or an empty string.

        Raises:
            UnavailableError: no server within the policy's bound.
            ConflictError: too late; ``code`` says how the episode ended (``episode_timed_out``, ``episode_expired``,
                ``episode_aborted``, ``episode_deleted``), or ``episode_ended`` if by another result.
            RequestError: the server refuses, e.g. because the episode is not ours or the task has no id.
        """
        call = wire.end_episode_call(self.client_uuid, episode_uuid, task_id_of(task), workflow_output)
        answer = await self._run(self._flows.perform(call))
        self._open.discard([episode_uuid])
        return answer.error or ""

    async def abort_episode(self, episode_uuid: str) -> None:
        """Give an episode up, like :meth:`abort`."""
        await self.abort([episode_uuid])

    async def can_continue_episode(self, episode_uuid: str) -> bool:
        """Whether the episode is still ours to run."""
        call = wire.can_continue_call(self.client_uuid, episode_uuid)
        return (await self._run(self._flows.perform(call))).can_continue

    async def claim_group(
        self,
        count: int,
        wait_seconds: float = 0.0,
        *,
        episode_type: EpisodeType = "train",
        discard_episode_timeout: float = 240.0,
        max_episode_seconds: float | None = None,
        throttle_policy: Throttle | None = None,
        idempotency_key: str | None = None,
        standby: bool = False,
    ) -> EpisodeGroup:
        """Claim ``count`` episodes at once or none, waiting up to ``wait_seconds`` for them.

        The group has an address of its own, where one call samples an answer for each episode. On ``standby`` it is
        claimed in advance: until its first call it gives way to whoever else claims, and to the end of the batch.

        Raises:
            UnavailableError: no server, or no episodes in time; ``code`` says which (``server_unreachable``,
                ``engine_offline``, ``engine_booting``, ``engine_syncing``, ``engine_post_rolling``, ``throttled``,
                ``no_episodes``). An engine that is OFFLINE is not waited for.
            RequestError: the server refuses the request itself (wrong token, count above its slots).
        """
        return await self._claim(
            Claim(
                count,
                wait_seconds,
                episode_type,
                discard_episode_timeout,
                max_episode_seconds,
                throttle_policy,
                idempotency_key,
                standby,
            )
        )

    async def end_group(self, task: Task | str, outputs: Mapping[str, WorkflowOutput]) -> str:
        """End all episodes of one task in one transition; ``outputs`` maps episode uuid to result. Returns and raises
        like :meth:`end_episode`."""
        call = wire.end_group_call(self.client_uuid, task_id_of(task), outputs)
        answer = await self._run(self._flows.perform(call))
        self._open.discard(outputs)
        return answer.error or ""

    async def abort(
        self, episode_uuids: Iterable[str], reason: str = "", metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Give up episodes. Never raises: where no server is there to hear it, it is said again before the next claim.

        The calls go on in the background when the caller is cancelled meanwhile; :meth:`close` waits for them.

        Args:
            reason: kept with the episodes and exported as their ``drop_reason``; cut at 2000 characters.
            metadata: kept and exported as that of an end.
        """
        uuids = list(episode_uuids)
        self._open.discard(uuids)
        calls = [wire.abort_call(self.client_uuid, uuid, reason, metadata) for uuid in uuids]
        tasks = [self.in_background(self._release(call)) for call in calls]
        if tasks:
            await asyncio.wait(tasks)

    @asynccontextmanager
    async def episode(
        self,
        discard_episode_timeout: float = 240.0,
        episode_type: EpisodeType = "train",
        throttle_policy: Throttle | None = None,
        *,
        max_episode_seconds: float | None = None,
    ) -> AsyncGenerator[AsyncEpisode]:
        """An episode that is aborted unless the block ends it; arguments and errors of :meth:`begin_episode`."""
        _, endpoint = await self.begin_episode(
            discard_episode_timeout, episode_type, throttle_policy, max_episode_seconds=max_episode_seconds
        )
        episode = AsyncEpisode(endpoint, self.end_episode)
        try:
            yield episode
        finally:
            if not episode.ended:
                await self.abort_episode(endpoint.episode_uuid)

    @asynccontextmanager
    async def group(
        self,
        count: int,
        wait_seconds: float | None = None,
        *,
        episode_type: EpisodeType = "train",
        discard_episode_timeout: float = 240.0,
        max_episode_seconds: float | None = None,
        throttle_policy: Throttle | None = None,
    ) -> AsyncGenerator[AsyncGroup]:
        """Episodes that are aborted unless the block ends them; arguments and errors of :meth:`claim_group`, but the
        default is to wait ``begin_timeout`` seconds."""
        episodes = await self.claim_group(
            count,
            self._begin_timeout if wait_seconds is None else wait_seconds,
            episode_type=episode_type,
            discard_episode_timeout=discard_episode_timeout,
            max_episode_seconds=max_episode_seconds,
            throttle_policy=throttle_policy,
        )
        group = AsyncGroup(episodes, self.end_group)
        try:
            yield group
        finally:
            if not group.ended:
                await self.abort(episodes.episode_uuids)

    async def run_episodes_until_all_complete(
        self,
        tasks: Iterable[ItemT],
        func: Callable[[ItemT], Awaitable[T]],
        max_workers: int = 32,
        auto_retry: bool | int = True,
    ) -> list[T | None]:
        """Call ``func(task)`` for each task, at most ``max_workers`` at once; episodes it begins and does not end are
        aborted.

        Args:
            tasks: read as there is room, so a generator of any length will do. For a GRPO group of N, give each task N
                times.
            func: begins and ends its own episode; what it begins in tasks of its own is tracked as well.
            max_workers: calls at once.
            auto_retry: ``True`` tries a task up to three times, a number that many times, ``False`` once.

        Returns:
            What ``func`` returned, in the order of the tasks; ``None`` where it failed for good (logged).

        Raises:
            ExceptionGroup: every task failed.
        """

        async def run_one(task: ItemT) -> T:
            return await self.run_tracked(func(task))

        return await sweep_async(tasks, run_one, max_workers, attempts_of(auto_retry), self._flows.policy)

    async def run_tracked(self, work: Awaitable[T]) -> T:
        """What ``work`` returns; episodes that it begins and does not end are aborted."""
        with self._open.run() as run:
            try:
                return await work
            finally:
                await self.abort(run.episodes)

    @staticmethod
    async def async_and_start_multi_engine(
        client_job_pairs: Sequence[tuple[AsyncSwarmClient, TrainJob]], force_restart: bool = False
    ) -> None:
        """:meth:`auto_sync_train_config_and_start_engine` for several servers at once; waits for all.

        Raises:
            ExceptionGroup: some did not start; it names them. The others are left as they are: rolling.
        """
        from swarm.client.engines import start_all_async

        await start_all_async(client_job_pairs, force_restart)

    async def add_entering_weight_sync_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once for each time that the engine begins to sync weights, and await what it returns if
        that is awaitable; from a task of the client's that ends with it.

        Raises:
            UnavailableError: no server within the policy's bound.
        """
        async with self._watching:
            if self._watch is None:
                first = await self._run(self._flows.perform(wire.wait_status_call(None, 0.0)))
                callbacks = WeightSyncCallbacks(first)
                watch = asyncio.create_task(follow(self._driver, self._flows, first, callbacks.observe))
                self._watch = watch, callbacks
            self._watch[1].add(callback)

    @asynccontextmanager
    async def watching_status(
        self, on_status: Callable[[ServerStatus], Awaitable[None]]
    ) -> AsyncGenerator[ServerStatus]:
        """The status now; while inside the block, ``on_status`` is called with it after each change of the engine's
        state.

        Raises:
            UnavailableError: no server within the policy's bound.
        """
        first = await self._run(self._flows.perform(wire.wait_status_call(None, 0.0)))
        watch = asyncio.create_task(follow(self._driver, self._flows, first, on_status))
        try:
            yield first
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    # -- plumbing

    async def close(self) -> None:
        """Finish background aborts (bounded), end the watch, close the connections, and stop the server if this client
        started it."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch[0].cancel()
            await asyncio.gather(watch[0], return_exceptions=True)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_GRACE
        # a claim handed back starts aborts of its own, so look again until nothing is left
        while self._background and (remaining := deadline - loop.time()) > 0:
            await asyncio.wait(self._background, timeout=remaining)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._driver.close()
        child, self._child = self._child, None
        if child is not None:
            await asyncio.to_thread(child.stop)

    async def __aenter__(self) -> Self:
        if self._auto_start and self._child is None:
            self._child = await asyncio.to_thread(ServerChild.ensure, self._flows.server_url)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _claim(self, wanted: Claim) -> EpisodeGroup:
        key = wanted.idempotency_key or uuid.uuid4().hex
        abandoned = asyncio.Event()
        claiming = self.in_background(self._run(claim(self._flows, wanted, key), abandoned))
        try:
            episodes = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            abandoned.set()
            if wanted.idempotency_key is None:
                # the server may be granting this very moment: have the poll answered now, and hand its episodes back
                claiming.add_done_callback(self._hand_back)
                if not claiming.done():
                    # and a claim that nobody waits for must not stand before those that somebody waits for
                    self.in_background(self._release(wire.withdraw_call(self.client_uuid, key)))
            raise
        self._open.add(episodes)
        return episodes

    async def _release(self, call: ReleaseCall) -> None:
        with suppress(StateError):  # a client that is closed tells nobody anything
            await self._run(self._flows.release(call))

    def _hand_back(self, claiming: asyncio.Task[EpisodeGroup]) -> None:
        if claiming.cancelled() or claiming.exception() is not None:
            return
        for episode in claiming.result():
            self.in_background(self._release(wire.abort_call(self.client_uuid, episode.episode_uuid)))

    def in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` to its end, for which :meth:`close` waits (bounded), whether anybody waits for it or not."""
        # the loop holds tasks weakly: without this set, work nobody waits for could vanish
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _run(self, flow: Flow[T], abandoned: asyncio.Event | None = None) -> T:
        return await self._driver.run(flow, abandoned)
