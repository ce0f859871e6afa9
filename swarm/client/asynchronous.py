"""``AsyncSwarmClient``: the swarm server for event loops; :class:`swarm.client.SwarmClient` is a facade over it.

Invariant: a claim that the caller no longer waits for is handed back, an abort that has begun is carried through, and a
closed client leaves nothing running.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Self, TypeVar

from swarm.client import wire
from swarm.client.calls import Calls
from swarm.client.child import ServerChild
from swarm.client.control import EngineSetup, start_engines
from swarm.client.episodes import AsyncEpisode, AsyncGroup, UserRun, current_run, each, run_each
from swarm.client.remote_engine import RemoteEngine
from swarm.client.throttling import Throttle
from swarm.client.wire import EpisodeEndpoint, EpisodeGroup, RetryPolicy
from swarm.http.client import HttpClient
from swarm.importer import own_code
from swarm.job import TrainJob
from swarm.protocol import (
    AbortEpisodeRequest,
    CanContinueResponse,
    ClaimEpisodeRequest,
    ClaimGroupRequest,
    EndEpisodeRequest,
    EpisodeRequest,
    EpisodeType,
    SuccessResponse,
)
from swarm.types import Notes, Task, WorkflowOutput

P = ParamSpec("P")
T = TypeVar("T")
PartT = TypeVar("PartT")
ItemT = TypeVar("ItemT")

#: Seconds that ``abort`` waits for the server.
ABORT_SECONDS = 2.0


def of(
    part: Callable[[AsyncSwarmClient], PartT], method: Callable[Concatenate[PartT, P], T]
) -> Callable[Concatenate[AsyncSwarmClient, P], T]:
    """A method of the client that calls ``method`` of one of its parts."""

    @wraps(method)
    def forwarded(self: AsyncSwarmClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(part(self), *args, **kwargs)

    return forwarded


def _calls(client: AsyncSwarmClient) -> Calls:
    return client.calls


def _engine(client: AsyncSwarmClient) -> RemoteEngine:
    return client.engine


def _setup(client: AsyncSwarmClient) -> EngineSetup:
    return client.setup


class AsyncSwarmClient:
    """Runs episodes and controls the engine of one swarm server.

    Args:
        server_url: address of the swarm server, e.g. ``http://127.0.0.1:10086``.
        token: the server's token; default the one in the address (``http://x:TOKEN@host``), else ``$SWARM_TOKEN``.
        client_uuid: name of this client towards the server; default a fresh one.
        request_timeout: seconds for one request (a claim: those it waits, and ten more).
        begin_timeout: seconds that :meth:`begin_episode` waits for a free episode: longer than a training step.
        boot_timeout: seconds that starting an engine may take.
        policy: when a request is repeated.
        auto_start_swarm_server: if nothing answers at a loopback address, ``async with`` starts a server there, which
            is stopped at close.
        code: noted with each end, to say what ran the episode; default :func:`own_code` of now.
        http: sends the requests, and is closed with this client; default: a client of its own.

    Attributes:
        calls: sends all that this client asks.
        engine: reads and commands the engine.
        setup: reads and changes the engine's job and code.

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
        code: str | None = None,
        http: HttpClient | None = None,
    ) -> None:
        self.calls = Calls(server_url, token, client_uuid, request_timeout, policy, http)
        self.engine = RemoteEngine(self.calls, boot_timeout)
        self.setup = EngineSetup(self.calls, self.engine)
        self._begin_timeout = begin_timeout
        self._code = own_code() if code is None else code
        self._auto_start = auto_start_swarm_server
        self._child: ServerChild | None = None

    @property
    def client_uuid(self) -> str:
        """The name of this client at the server."""
        return self.calls.client_uuid

    @property
    def server_url(self) -> str:
        """The address of the server."""
        return self.calls.server_url

    @property
    def started_server(self) -> bool:
        """Whether the server is one that this client started, and stops when it is closed."""
        return self._child is not None

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
        fields = {
            "client_uuid": self.client_uuid,
            "episode_type": episode_type,
            "discard_episode_timeout": discard_episode_timeout,
            "max_episode_seconds": max_episode_seconds,
            "idempotency_key": idempotency_key,
        }
        wanted = wire.checked(ClaimEpisodeRequest, fields)
        [endpoint] = await self._claim(wanted, self._begin_timeout, throttle_policy)
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
        end = {"episode_uuid": episode_uuid, "workflow_output": wire.with_code(workflow_output, self._code)}
        outputs = {episode_uuid: workflow_output}
        ended = await self.calls.end("/end_episode", EndEpisodeRequest, task, outputs, end)
        self._note_ended(outputs)
        return ended.error or ""

    async def abort_episode(self, episode_uuid: str) -> None:
        """Abort one episode, like :meth:`abort`."""
        await self.abort(episode_uuid)

    async def can_continue_episode(self, episode_uuid: str) -> bool:
        """Whether this client may still run the episode."""
        body = EpisodeRequest(client_uuid=self.client_uuid, episode_uuid=episode_uuid)
        call = wire.Call("POST", "/can_continue_episode", CanContinueResponse, body)
        return (await self.calls.perform(call)).can_continue

    async def claim_group(
        self,
        count: int,
        wait_seconds: float | None = 0.0,
        *,
        episode_type: EpisodeType = "train",
        discard_episode_timeout: float = 240.0,
        max_episode_seconds: float | None = None,
        throttle_policy: Throttle | None = None,
        idempotency_key: str | None = None,
        unless_batch_waits: bool = False,
    ) -> EpisodeGroup:
        """Claim ``count`` episodes at once or none, waiting up to ``wait_seconds`` (``None``: ``begin_timeout``).

        The group has an address of its own, where one request samples an answer for each episode. With
        ``unless_batch_waits`` the claim fails at once while the model answers but the trainer needs no episodes: it
        computes a step and enough for the next one wait or run, or it died and is being started again.

        Raises:
            UnavailableError: no server, or no episodes in time; ``code`` says which (``server_unreachable``,
                ``engine_offline``, ``engine_booting``, ``engine_syncing``, ``engine_post_rolling``, ``batch_waits``,
                ``trainer_away``, ``throttled``, ``no_episodes``). An engine that is OFFLINE is not waited for.
            RequestError: the server refuses the request itself (wrong token, count above its slots).
        """
        fields = {
            "client_uuid": self.client_uuid,
            "count": count,
            "episode_type": episode_type,
            "discard_episode_timeout": discard_episode_timeout,
            "max_episode_seconds": max_episode_seconds,
            "idempotency_key": idempotency_key,
            "unless_batch_waits": unless_batch_waits,
        }
        within = self._begin_timeout if wait_seconds is None else wait_seconds
        return await self._claim(wire.checked(ClaimGroupRequest, fields), within, throttle_policy)

    async def end_group(self, task: Task | str, outputs: Mapping[str, WorkflowOutput]) -> str:
        """End all episodes of one task in one transition; ``outputs`` maps episode uuid to result. Returns and raises
        like :meth:`end_episode`."""
        ended = await self.calls.end_group(task, outputs, self._code)
        self._note_ended(outputs)
        return ended.error or ""

    async def abort(self, episode_uuids: str | Iterable[str], reason: str = "", notes: Notes | None = None) -> None:
        """Abort an episode or several. Never raises: if no server answers within seconds, or the caller is cancelled,
        the calls go on in the background; :meth:`close` waits for them, up to a deadline.

        Args:
            reason: kept with the episodes and exported as their ``drop_reason``; cut at 2000 characters.
            notes: kept and exported like those of an end.
        """
        uuids = [episode_uuids] if isinstance(episode_uuids, str) else list(episode_uuids)
        self._note_ended(uuids)
        bodies = [
            AbortEpisodeRequest(client_uuid=self.client_uuid, episode_uuid=uuid, reason=reason, notes=notes)
            for uuid in uuids
        ]
        calls = [wire.Call("POST", "/abort_episode", SuccessResponse, body) for body in bodies]
        tasks = [self.calls.release(call) for call in calls]
        if tasks:
            await asyncio.wait(tasks, timeout=ABORT_SECONDS)

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
            wait_seconds,
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

        return await run_each(self.run_tracked, each(tasks), func, max_workers, auto_retry, self.calls.policy)

    async def run_tracked(self, work: Awaitable[T]) -> T:
        """What ``work`` returns; episodes that it begins and does not end are aborted."""
        run = UserRun(self)
        token = current_run.set(run)
        try:
            return await work
        finally:
            current_run.reset(token)
            await self.abort(run.episodes)

    # -- engine, and its setup

    status = of(_calls, Calls.status)
    get_engine_status = of(_engine, RemoteEngine.get_engine_status)
    get_global_step = of(_engine, RemoteEngine.get_global_step)
    get_rollout_stat = of(_engine, RemoteEngine.get_rollout_stat)
    print_rollout_stat = of(_engine, RemoteEngine.print_rollout_stat)
    judged_groups = of(_engine, RemoteEngine.judged_groups)
    data_report = of(_engine, RemoteEngine.data_report)
    data_delete = of(_engine, RemoteEngine.data_delete)
    data_export = of(_engine, RemoteEngine.data_export)
    get_episode_buffer = of(_engine, RemoteEngine.get_episode_buffer)
    wait_for_state = of(_engine, RemoteEngine.wait_for_state)
    record_pair = of(_engine, RemoteEngine.record_pair)
    record_rating = of(_engine, RemoteEngine.record_rating)
    follow_stages = of(_engine, RemoteEngine.follow_stages)
    agree_sync_weight = of(_engine, RemoteEngine.agree_sync_weight)
    start_engine = of(_engine, RemoteEngine.start_engine)
    stop_engine = of(_engine, RemoteEngine.stop_engine)
    add_entering_weight_sync_callback = of(_engine, RemoteEngine.add_entering_weight_sync_callback)
    watching_status = of(_engine, RemoteEngine.watching_status)

    sync_train_config = of(_setup, EngineSetup.sync_train_config)
    sync_train_code = of(_setup, EngineSetup.sync_train_code)
    sync_train_code_from_dir = of(_setup, EngineSetup.sync_train_code_from_dir)
    code = of(_setup, EngineSetup.code)
    code_archive = of(_setup, EngineSetup.code_archive)
    select_code = of(_setup, EngineSetup.select_code)
    resolve_config = of(_setup, EngineSetup.resolve_config)
    policies = of(_setup, EngineSetup.policies)
    explain_policy = of(_setup, EngineSetup.explain_policy)
    promote_policy = of(_setup, EngineSetup.promote_policy)
    roll_back_policy = of(_setup, EngineSetup.roll_back_policy)
    pin_policy = of(_setup, EngineSetup.pin_policy)
    resume_training = of(_setup, EngineSetup.resume_training)
    kept_policies = of(_setup, EngineSetup.kept_policies)
    kept_policy = of(_setup, EngineSetup.kept_policy)
    check_answers = of(_setup, EngineSetup.check_answers)
    delete_policy = of(_setup, EngineSetup.delete_policy)
    runs = of(_setup, EngineSetup.runs)
    run_record = of(_setup, EngineSetup.run_record)
    auto_sync_train_config_and_start_engine = of(_setup, EngineSetup.auto_sync_train_config_and_start_engine)

    @staticmethod
    async def async_and_start_multi_engine(
        client_job_pairs: Sequence[tuple[AsyncSwarmClient, TrainJob]], force_restart: bool = False
    ) -> None:
        """:meth:`auto_sync_train_config_and_start_engine` for several servers at once; waits for all.

        Raises:
            ExceptionGroup: some did not start; it names them. The others are left as they are: rolling.
        """
        await start_engines([(client.setup, job) for client, job in client_job_pairs], force_restart)

    async def close(self) -> None:
        """End waiting claims and the watches, finish background aborts (up to a deadline), close the connections, and
        stop the server if this client started it."""
        await self.calls.close(self.engine.watches)
        child, self._child = self._child, None
        if child is not None:
            await asyncio.to_thread(child.stop)

    async def __aenter__(self) -> Self:
        if self._auto_start and self._child is None:
            self._child = await ServerChild.ensure(self.calls.server_url, self.calls.token)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _claim(self, wanted: ClaimEpisodeRequest, wait_seconds: float, throttle: Throttle | None) -> EpisodeGroup:
        run = current_run.get()
        if run is None or run.loop is not asyncio.get_running_loop():
            return await self.calls.claim(wanted, wait_seconds, throttle)
        with run.claims.waiting():
            episodes = await self.calls.claim(wanted, wait_seconds, throttle)
        if run.client is self:
            run.episodes.update(episodes.episode_uuids)
        return episodes

    @staticmethod
    def _note_ended(episode_uuids: Iterable[str]) -> None:
        if (run := current_run.get()) is not None:
            run.episodes.difference_update(episode_uuids)
