"""``SwarmClient``: the swarm server for threads; any number of them may share one client.

Invariant: an episode that fails is aborted, and no call waits without a bound.

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

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from swarm.client import wire
from swarm.client.episodes import DEFAULT_ATTEMPTS, OpenEpisodes, Sweep
from swarm.client.flows import ABORT_POLICY, Flow, Flows, Pause
from swarm.client.policy import Outcome, Reply, RetryPolicy
from swarm.client.wire import EpisodeEndpoint
from swarm.errors import StateError, SwarmGatewayError, UnavailableError
from swarm.job import TrainJob
from swarm.protocol import EngineStatus, EpisodeType, PoolInformation, ServerStatus
from swarm.states import EngineState
from swarm.types import Task, WorkflowOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")
ItemT = TypeVar("ItemT")


class Episode:
    """One claimed episode inside :meth:`SwarmClient.episode`."""

    def __init__(self, client: SwarmClient, endpoint: EpisodeEndpoint) -> None:
        self._client = client
        self.episode_uuid = endpoint.episode_uuid
        self.base_url = endpoint.base_url
        self.api_key = endpoint.api_key
        self.ended = False

    def end(self, task: Task, workflow_output: WorkflowOutput) -> str:
        """Hand in the result; see :meth:`SwarmClient.end_episode`.

        Raises:
            StateError: it has been ended before.
        """
        if self.ended:
            raise StateError(f"episode {self.episode_uuid} has been ended already")
        dropped = self._client.end_episode(task, self.episode_uuid, workflow_output)
        self.ended = True
        return dropped


class SwarmClient:
    """Runs episodes and controls the engine of one swarm server.

    Args:
        server_url: address of the swarm server, e.g. ``http://127.0.0.1:10086``.
        token: the server's token; default ``$SWARM_TOKEN``.
        client_uuid: name of this client towards the server; default a fresh one.
        request_timeout: seconds for one request (a claim: those it waits, and ten more).
        begin_timeout: seconds that :meth:`begin_episode` waits for a free episode: longer than a training step.
        boot_timeout: seconds that starting an engine may take.
        policy: when a request is repeated.

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
    ) -> None:
        self._flows = Flows.of(server_url, token, client_uuid, request_timeout, policy)
        self._begin_timeout = begin_timeout
        self._boot_timeout = boot_timeout
        self._http = httpx.Client(limits=wire.LIMITS, trust_env=False, verify=wire.tls_context())
        self._open = OpenEpisodes()

    @property
    def client_uuid(self) -> str:
        """The name of this client towards the server."""
        return self._flows.client_uuid

    # -- episodes

    def begin_episode(
        self,
        discard_episode_timeout: float = 240.0,
        episode_type: EpisodeType = "train",
        throttle_policy: Mapping[str, Any] | None = None,
    ) -> tuple[str, EpisodeEndpoint]:
        """Claim an episode, waiting while none is free or the weights are being synced.

        Args:
            discard_episode_timeout: seconds without a model call after which the server takes the episode back.
            episode_type: ``"eval"`` episodes are never trained on.
            throttle_policy: passed on to the server.

        Returns:
            The episode's uuid and where it samples (``base_url``, ``api_key``, ``episode_uuid``).

        Raises:
            UnavailableError: no server, an engine that is OFFLINE, or nothing free within ``begin_timeout``; or the
                :meth:`run_episodes_until_all_complete` that this is part of is being stopped.
        """
        flow = self._flows.claim(None, self._begin_timeout, episode_type, discard_episode_timeout, throttle_policy)
        stopping = self._open.stopping
        [endpoint] = self._run(flow, stopping)
        self._open.add(endpoint.episode_uuid)
        # granted in the poll during which the stop came: the run aborts it
        _check(stopping)
        return endpoint.episode_uuid, endpoint

    def end_episode(self, task: Task, episode_uuid: str, workflow_output: WorkflowOutput) -> str:
        """Hand in the result of an episode; repeating it changes nothing.

        Returns:
            Why the server will not train the episode although it took the end, or an empty string.

        Raises:
            UnavailableError: no server within the policy's bound.
            RequestError: the episode is no longer ours, e.g. after its idle timeout.
        """
        call = wire.end_episode_call(self.client_uuid, episode_uuid, task.task_id, workflow_output)
        answer = self._run(self._flows.perform(call))
        self._open.discard(episode_uuid)
        return answer.error or ""

    def abort_episode(self, episode_uuid: str) -> None:
        """Give an episode up. Never raises for the server's sake: its idle timeout does the rest (logged)."""
        call = wire.abort_call(self.client_uuid, episode_uuid)
        try:
            self._run(self._flows.perform(call, policy=ABORT_POLICY))
        except SwarmGatewayError as exc:
            logger.warning("episode %s could not be aborted and falls to its idle timeout: %s", episode_uuid, exc)
        self._open.discard(episode_uuid)

    def can_continue_episode(self, episode_uuid: str) -> bool:
        """Whether the episode is still ours to run."""
        call = wire.can_continue_call(self.client_uuid, episode_uuid)
        return self._run(self._flows.perform(call)).can_continue

    @contextmanager
    def episode(
        self,
        discard_episode_timeout: float = 240.0,
        episode_type: EpisodeType = "train",
        throttle_policy: Mapping[str, Any] | None = None,
    ) -> Generator[Episode, None, None]:
        """An episode that is aborted unless the block ends it; arguments and errors of :meth:`begin_episode`."""
        _, endpoint = self.begin_episode(discard_episode_timeout, episode_type, throttle_policy)
        episode = Episode(self, endpoint)
        try:
            yield episode
        finally:
            if not episode.ended:
                self.abort_episode(endpoint.episode_uuid)

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
        attempts = DEFAULT_ATTEMPTS if auto_retry is True else max(1, int(auto_retry))
        stopping = threading.Event()

        def run_one(task: ItemT) -> T:
            with self._open.run(self.abort_episode, stopping):
                return func(task)

        return Sweep(tasks, run_one, attempts, self._flows.policy, stopping).run(max_workers)

    # -- engine

    def get_engine_status(self) -> EngineStatus:
        """State of the engine."""
        return self._run(self._flows.perform(wire.ENGINE_STATUS))

    def get_global_step(self) -> int:
        """How many training steps are complete."""
        return self.get_engine_status().global_step

    def get_rollout_stat(self) -> PoolInformation:
        """What the current batch has collected and still needs."""
        return self._run(self._flows.perform(wire.POOL))

    def status(self) -> ServerStatus:
        """Everything the server tells about itself."""
        return self._run(self._flows.perform(wire.STATUS))

    def wait_for_state(self, *states: EngineState, wait_seconds: float) -> ServerStatus:
        """Wait until the engine is in one of ``states``.

        Raises:
            EngineError: the engine is OFFLINE and that was not waited for; carries its reason and last lines.
            UnavailableError: the time is over.
        """
        return self._run(self._flows.wait_for_state(states, wait_seconds))

    def sync_train_config(self, job: TrainJob) -> None:
        """Hand over the job that the next :meth:`start_engine` runs.

        Raises:
            RequestError: the engine is not OFFLINE, or the job is wrong.
        """
        self._run(self._flows.perform(wire.sync_config_call(job)))

    def start_engine(self, wait: bool = True) -> int | None:
        """Start the engine and, unless told not to, ``wait`` until it is ROLLING; returns its process id.

        Raises:
            RequestError: no job was synced, or it runs already.
            EngineError: it died while booting; carries its reason and last lines.
            UnavailableError: not ROLLING within ``boot_timeout``.
        """
        return self._run(self._flows.start_engine(self._boot_timeout if wait else 0.0))

    def stop_engine(self) -> None:
        """Stop the engine from any state."""
        self._run(self._flows.perform(wire.STOP_ENGINE))

    def auto_sync_train_config_and_start_engine(self, job: TrainJob, force_restart: bool = False) -> None:
        """Make the engine run ``job``: a no-op if it rolls with it, a wait if it boots or syncs, else a start.

        Raises:
            ConflictError: the engine runs another job and ``force_restart`` is off; names the fields that differ.
            EngineError: it died while booting.
            UnavailableError: no server, or not ROLLING within ``boot_timeout``.
        """
        self._run(self._flows.ensure_engine(job, force_restart, self._boot_timeout))

    # -- plumbing

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, flow: Flow[T], stopping: threading.Event | None = None) -> T:
        stopping = stopping or threading.Event()
        outcome: Outcome | None = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as stop:
                return stop.value
            _check(stopping)
            if isinstance(step, Pause):
                outcome = None
                stopping.wait(step.seconds)
                continue
            try:
                answer = self._http.request(
                    step.method, step.url, headers=step.headers, content=step.content, timeout=step.timeout
                )
                outcome = Reply(answer.status_code, dict(answer.headers), answer.content)
            except httpx.RequestError as exc:
                outcome = exc


def _check(stopping: threading.Event | None) -> None:
    if stopping is not None and stopping.is_set():
        raise UnavailableError("the run that this episode is part of is being stopped", code="run_stopped")
