"""``SwarmClient``: the swarm server for threads; any number of them may share one client.

Invariant: an episode that fails is aborted, no call waits without a bound, and nothing of the client is left once it
is closed.

A rollout in three lines, the way AgentJet's clients write it::

    episode_uuid, api = client.begin_episode()
    answer = OpenAI(base_url=api.base_url, api_key=api.api_key).chat.completions.create(...)
    client.end_episode(task, episode_uuid, WorkflowOutput(reward=judge(answer)))

or, with the abort built in::

    with client.episode() as episode:
        answer = OpenAI(base_url=episode.base_url, api_key=episode.api_key).chat.completions.create(...)
        episode.end(task, WorkflowOutput(reward=judge(answer)))
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from swarm.client import wire
from swarm.client.child import ServerChild
from swarm.client.claiming import Claim, claim
from swarm.client.control import EngineControl
from swarm.client.episodes import OpenEpisodes, Sweep
from swarm.client.flows import ABORT_POLICY, Flow, Flows
from swarm.client.handles import Episode, Group, task_id_of
from swarm.client.policy import RetryPolicy
from swarm.client.retrying import attempts_of
from swarm.client.throttle import Throttle
from swarm.client.transport import Driver, check_running
from swarm.client.watching import WatchThread, WeightSyncCallbacks
from swarm.client.wire import EpisodeEndpoint, EpisodeGroup
from swarm.errors import StateError
from swarm.job import TrainJob
from swarm.protocol import EpisodeType, ServerStatus
from swarm.types import Task, WorkflowOutput

T = TypeVar("T")
ItemT = TypeVar("ItemT")


class SwarmClient(EngineControl):
    """Runs episodes and controls the engine of one swarm server.

    Args:
        server_url: address of the swarm server, e.g. ``http://127.0.0.1:10086``.
        token: the server's token; default ``$SWARM_TOKEN``.
        client_uuid: name of this client towards the server; default a fresh one.
        request_timeout: seconds for one request (a claim: those it waits, and ten more).
        begin_timeout: seconds that :meth:`begin_episode` waits for a free episode: longer than a training step.
        boot_timeout: seconds that starting an engine may take.
        policy: when a request is repeated.
        auto_start_swarm_server: if nothing answers at a loopback address, start a server there and stop it at close.

    Raises:
        ConfigError: ``server_url`` is no http address, or none where a server can be started.
        UnavailableError: the server to be started did not come up.
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
    ) -> None:
        super().__init__(Flows.of(server_url, token, client_uuid, request_timeout, policy), boot_timeout)
        self._begin_timeout = begin_timeout
        self._child = ServerChild.ensure(self._flows.server_url) if auto_start_swarm_server else None
        self._driver = Driver()
        self._open = OpenEpisodes()
        self._watching = threading.Lock()
        self._watch: tuple[WatchThread, WeightSyncCallbacks] | None = None

    # -- episodes

    def begin_episode(
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
            UnavailableError: no server, an engine that is OFFLINE, or nothing free within ``begin_timeout``; or the
                :meth:`run_episodes_until_all_complete` that this is part of is being stopped.
        """
        [endpoint] = self._claim(
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

    def end_episode(self, task: Task | str, episode_uuid: str, workflow_output: WorkflowOutput) -> str:
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
        answer = self._run(self._flows.perform(call))
        self._open.discard([episode_uuid])
        return answer.error or ""

    def abort_episode(self, episode_uuid: str) -> None:
        """Give an episode up. Never raises: where no server is there to hear it, it is said again before the next
        claim."""
        self.abort([episode_uuid])

    def can_continue_episode(self, episode_uuid: str) -> bool:
        """Whether the episode is still ours to run."""
        call = wire.can_continue_call(self.client_uuid, episode_uuid)
        return self._run(self._flows.perform(call)).can_continue

    def claim_group(
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
        Other arguments and errors are those of :meth:`begin_episode`.

        Raises:
            RequestError: the server can never run so many at once.
        """
        return self._claim(
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

    def end_group(self, task: Task | str, outputs: Mapping[str, WorkflowOutput]) -> str:
        """End all episodes of one task in one transition; ``outputs`` maps episode uuid to result. Returns and raises
        like :meth:`end_episode`."""
        answer = self._run(self._flows.perform(wire.end_group_call(self.client_uuid, task_id_of(task), outputs)))
        self._open.discard(outputs)
        return answer.error or ""

    def abort(self, episode_uuids: Iterable[str], reason: str = "", metadata: Mapping[str, Any] | None = None) -> None:
        """Give episodes up, like :meth:`abort_episode`; ``reason`` (cut at 2000 characters) and ``metadata`` are kept
        with them and exported."""
        deadline = self._flows.clock() + ABORT_POLICY.total
        for uuid in episode_uuids:
            call = wire.abort_call(self.client_uuid, uuid, reason, metadata)
            with suppress(StateError):  # a client that is closed tells nobody anything
                self._run(self._flows.release(call, deadline))
            self._open.discard([uuid])

    @contextmanager
    def episode(
        self,
        discard_episode_timeout: float = 240.0,
        episode_type: EpisodeType = "train",
        throttle_policy: Throttle | None = None,
        *,
        max_episode_seconds: float | None = None,
    ) -> Generator[Episode, None, None]:
        """An episode that is aborted unless the block ends it; arguments and errors of :meth:`begin_episode`."""
        _, endpoint = self.begin_episode(
            discard_episode_timeout, episode_type, throttle_policy, max_episode_seconds=max_episode_seconds
        )
        episode = Episode(endpoint, self.end_episode)
        try:
            yield episode
        finally:
            if not episode.ended:
                self.abort_episode(endpoint.episode_uuid)

    @contextmanager
    def group(
        self,
        count: int,
        wait_seconds: float | None = None,
        *,
        episode_type: EpisodeType = "train",
        discard_episode_timeout: float = 240.0,
        max_episode_seconds: float | None = None,
        throttle_policy: Throttle | None = None,
    ) -> Generator[Group, None, None]:
        """Episodes that are aborted unless the block ends them; arguments and errors of :meth:`claim_group`, but the
        default is to wait ``begin_timeout`` seconds."""
        episodes = self.claim_group(
            count,
            self._begin_timeout if wait_seconds is None else wait_seconds,
            episode_type=episode_type,
            discard_episode_timeout=discard_episode_timeout,
            max_episode_seconds=max_episode_seconds,
            throttle_policy=throttle_policy,
        )
        group = Group(episodes, self.end_group)
        try:
            yield group
        finally:
            if not group.ended:
                self.abort(episodes.episode_uuids)

    def run_episodes_until_all_complete(
        self,
        tasks: Iterable[ItemT],
        func: Callable[[ItemT], T],
        max_workers: int = 32,
        auto_retry: bool | int = True,
    ) -> list[T | None]:
        """Call ``func(task)`` for each task in threads; episodes it begins and does not end are aborted.

        Args:
            tasks: read as threads come free, so a generator of any length will do. For a GRPO group of N, give each
                task N times.
            func: begins and ends its own episode; what it begins in threads of its own is not tracked.
            max_workers: threads.
            auto_retry: ``True`` tries a task up to three times, a number that many times, ``False`` once.

        Returns:
            What ``func`` returned, in the order of the tasks; ``None`` where it failed for good (logged).

        Raises:
            ExceptionGroup: every task failed.
        """
        stopping = threading.Event()

        def run_one(task: ItemT) -> T:
            return self.run_tracked(lambda: func(task), stopping)

        return Sweep(tasks, run_one, attempts_of(auto_retry), self._flows.policy, stopping).run(max_workers)

    def run_tracked(self, func: Callable[[], T], stopping: threading.Event | None = None) -> T:
        """What ``func`` returns; episodes that it begins and does not end are aborted, and once ``stopping`` is set it
        begins none."""
        with self._open.run(stopping) as run:
            try:
                return func()
            finally:
                self.abort(tuple(run.episodes))

    @staticmethod
    def async_and_start_multi_engine(
        client_job_pairs: Sequence[tuple[SwarmClient, TrainJob]], force_restart: bool = False
    ) -> None:
        """:meth:`auto_sync_train_config_and_start_engine` for several servers at once; waits for all.

        Raises:
            ExceptionGroup: some did not start; it names them. The others are left as they are: rolling.
        """
        from swarm.client.engines import start_all

        start_all(client_job_pairs, force_restart)

    def add_entering_weight_sync_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once for each time that the engine begins to sync weights, from a thread of the client's
        that ends with it.

        Raises:
            UnavailableError: no server within the policy's bound.
        """
        with self._watching:
            if self._watch is None:
                first = self._run(self._flows.perform(wire.wait_status_call(None, 0.0)))
                callbacks = WeightSyncCallbacks(first)
                self._watch = WatchThread(self._flows, first, callbacks.observe), callbacks
            self._watch[1].add(callback)

    @contextmanager
    def watching_status(self, on_status: Callable[[ServerStatus], object]) -> Generator[ServerStatus, None, None]:
        """The status now; while inside the block, ``on_status`` is called with it after each change of the engine's
        state, from a thread.

        Raises:
            UnavailableError: no server within the policy's bound.
        """

        async def observe(status: ServerStatus) -> None:
            on_status(status)

        first = self._run(self._flows.perform(wire.wait_status_call(None, 0.0)))
        watch = WatchThread(self._flows, first, observe)
        try:
            yield first
        finally:
            watch.stop()

    # -- plumbing

    def close(self) -> None:
        """Close the connections, end the watch, and stop the server if this client started it."""
        with self._watching:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch[0].stop()
        self._driver.close()
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _claim(self, wanted: Claim) -> EpisodeGroup:
        stopping = self._open.stopping
        episodes = self._run(claim(self._flows, wanted), stopping)
        self._open.add(episodes)
        # granted in the poll during which the stop came: the run aborts it
        check_running(stopping)
        return episodes

    def _run(self, flow: Flow[T], stopping: threading.Event | None = None) -> T:
        return self._driver.run(flow, stopping)
