"""AgentJet's ``SwarmClient`` over ours, and its loops over tasks.

Invariant: arguments and results are AgentJet's; what happens in between (claims that wait, ends that are repeated,
aborts) is our client's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from time import monotonic
from typing import Any, Protocol, TypeVar

from swarm import client, types
from swarm.agentjet.executors import PeriodicDrainThreadPoolExecutor, interrupted, note_begun, note_over
from swarm.agentjet.job import AgentJetJob
from swarm.agentjet.schema import OpenaiBaseUrlAndApiKey, Task, WorkflowOutput, task_id_of
from swarm.client.control import differences
from swarm.client.episodes import AllFailedError
from swarm.client.portal import BlockingCall
from swarm.client.workflow import output_of
from swarm.errors import ConfigError, ConflictError, RequestError, StateError, SwarmGatewayError, UnavailableError
from swarm.job import layered
from swarm.protocol import LATE_CODES, EpisodeType, SwarmThrottlePolicy
from swarm.states import EngineState
from swarm.status import ServerStatus

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

#: Seconds that starting an engine, or a step that clients agreed to, may take.
_PATIENCE = 3600.0
#: Seconds between two looks whether clients agreed in vain.
_LOOK_SECONDS = 5.0
#: Episodes at once in :func:`auto_train_with_dataset`, AgentJet's number.
_TRAIN_PARALLEL = 64


class SwarmClient(client.SwarmClient):
    """AgentJet's client of a swarm server; any number of threads may share it. What does not stand here is as in
    :class:`swarm.client.SwarmClient`.

    Args:
        server_url: address of the server; a token is the password in it (``http://x:TOKEN@host:10086``), or
            ``$SWARM_TOKEN``.
        verbose: log each episode.
        agentjet_job: what :meth:`auto_sync_train_config_and_start_engine` runs if it is given no job.
        auto_start_swarm_server: if nothing answers at a loopback address, start a server that ends with this process.
    """

    def __init__(
        self,
        server_url: str,
        verbose: bool = True,
        agentjet_job: AgentJetJob | None = None,
        auto_start_swarm_server: bool = False,
    ) -> None:
        self.verbose = verbose
        self._job = agentjet_job
        super().__init__(server_url, boot_timeout=_PATIENCE, auto_start_swarm_server=auto_start_swarm_server)

    # ------------------------------------------------------------------ episodes

    def begin_episode(
        self,
        discard_episode_timeout: float = 240.0,
        episode_type: EpisodeType = "train",
        throttle_policy: SwarmThrottlePolicy | None = None,
    ) -> tuple[str, OpenaiBaseUrlAndApiKey]:
        """Claim an episode; see :meth:`swarm.client.AsyncSwarmClient.begin_episode`. In a loop over tasks, Ctrl-C ends
        the wait."""
        here = self.connection
        claim = here.client.begin_episode(discard_episode_timeout, episode_type, throttle_policy)
        episode_uuid, api = BlockingCall(here, claim).result(interrupted())
        note_begun(episode_uuid, self.abort_episode)
        if self.verbose:
            logger.info("claimed episode %s", episode_uuid)
        return episode_uuid, OpenaiBaseUrlAndApiKey(**api.model_dump())

    def end_episode(
        self,
        task: Task | types.Task,
        episode_uuid: str,
        workflow_output: WorkflowOutput | types.WorkflowOutput,
        declare_client_active: bool = True,
    ) -> None:
        """Hand in the result of an episode; see :meth:`swarm.client.AsyncSwarmClient.end_episode`. One that comes too
        late is no error, as for AgentJet's own client, but logged.

        Raises:
            ConfigError: the output has no finite reward, or the task is empty.
        """
        if not declare_client_active:
            raise ConfigError(
                "declare_client_active=False: a client that ends train episodes takes part in their batch"
            )
        output = output_of(workflow_output, "the agent")
        try:
            dropped = super().end_episode(task_id_of(task), episode_uuid, output)
        except ConflictError as exc:
            if exc.code not in LATE_CODES:
                raise
            # an error would make the loops run the task again
            dropped = exc.message
        note_over(episode_uuid)
        if dropped:
            logger.warning("episode %s will not be trained: %s", episode_uuid, dropped)
        elif self.verbose:
            logger.info("ended episode %s", episode_uuid)

    def abort_episode(self, episode_uuid: str) -> None:
        """Give up an episode."""
        super().abort_episode(episode_uuid)
        note_over(episode_uuid)

    # ------------------------------------------------------------------ the engine

    def get_engine_status(self) -> tuple[str, dict[str, Any]]:
        """The engine's state, and with details; ``ENGINE.CANNOT_CONNECT`` if no server answers."""
        try:
            status = super().get_engine_status()
        except UnavailableError as exc:
            logger.error("%s", exc.message)
            return "ENGINE.CANNOT_CONNECT", {}
        return str(status.engine_status), status.model_dump(mode="json")

    def check_group_size(self, episodes: int) -> None:
        """Log a warning where a batch is of groups of more than these ``episodes`` of a task."""
        pool = self.status(episodes=0, steps=0).pool
        if pool is not None and pool.whole_groups and episodes < pool.num_repeat:
            logger.warning(
                "local_grpo_n is %d, and the job trains groups of %d episodes of one task: a task is trained once it "
                "comes again, or other clients have run the rest",
                episodes,
                pool.num_repeat,
            )

    def server_experiment_dir(self) -> str | None:
        """``None``: the server's run folder is on its machine, and not for its clients (logged)."""
        logger.warning("server_experiment_dir(): the server's run folder is not for its clients; use a folder of yours")
        return None

    def sync_train_config(self, agentjet_job: AgentJetJob) -> None:
        """Hand over the job that the next :meth:`start_engine` runs."""
        agentjet_job.train_job()  # refused and warned about here, where its author sees it
        super().sync_train_config(agentjet_job.to_yaml(), set=agentjet_job.extras)
        self._job = agentjet_job

    def auto_sync_train_config_and_start_engine(
        self, agentjet_job: AgentJetJob | None = None, force_restart: bool = False
    ) -> None:
        """Make the engine run the job if it is OFFLINE, and wait until it is ROLLING. An engine that runs is used as it
        is, unless ``force_restart`` stops it first; a warning names what differs from the job."""
        job = agentjet_job or self._job
        if job is None:
            raise ConfigError("there is no job: give an AgentJetJob")
        wanted = job.train_job()
        status = self.status()
        if force_restart and status.engine.engine_status is not EngineState.OFFLINE:
            self.stop_engine()
            status = self.wait_for_state(EngineState.OFFLINE, wait_seconds=_PATIENCE)
        if status.engine.engine_status is EngineState.OFFLINE:
            try:
                self.sync_train_config(job)
                self.start_engine(wait=False)
            except RequestError:
                # another client may have started it meanwhile
                if self.status().engine.engine_status is EngineState.OFFLINE:
                    raise
        status = self.wait_for_state(EngineState.ROLLING, EngineState.ROLLING_POST, wait_seconds=_PATIENCE)
        self._job = job
        expected = layered(wanted.model_dump(exclude_unset=True), server=status.job_defaults).job
        if status.job is not None and (differing := differences(expected, status.job)):
            logger.warning("the engine runs another job, and is used as it is: %s differ", ", ".join(differing))

    @staticmethod
    def async_and_start_multi_engine(  # pyright: ignore[reportIncompatibleMethodOverride]
        client_job_pairs: Sequence[tuple[SwarmClient, AgentJetJob]], force_restart: bool = False
    ) -> None:
        """:meth:`auto_sync_train_config_and_start_engine` for several servers at once; waits for all.

        Raises:
            ExceptionGroup: some did not start.
        """
        with ThreadPoolExecutor(max(1, len(client_job_pairs))) as pool:
            works = [
                pool.submit(client.auto_sync_train_config_and_start_engine, job, force_restart)
                for client, job in client_job_pairs
            ]
        errors = [exc for work in works if isinstance(exc := work.exception(), Exception)]
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {len(works)} engines did not start", errors)

    def sync_train_code(self, archive: bytes | str, force_restart: bool = False) -> None:
        """See :meth:`swarm.client.AsyncSwarmClient.sync_train_code`."""
        super().sync_train_code(archive, force_restart=force_restart)

    def agree_sync_weight(self) -> bool:
        """Say that this client has no more for the current batch, and wait until the engine syncs weights, or ends, or
        nothing is left that could be trained.

        Returns:
            Whether the agreement counts; if not, the reason is logged.
        """
        synced = threading.Event()
        before: int | None = None

        def observe(status: ServerStatus) -> None:
            over = status.engine.engine_status in (EngineState.WEIGHT_SYNCING, EngineState.OFFLINE)
            if over or (before is not None and status.weight_syncs > before):
                synced.set()

        with self.watching_status(observe) as status:
            before = status.weight_syncs
            answer = super().agree_sync_weight()
            if not answer.success:
                logger.warning("the agreement does not count: %s", answer.failure_reason)
                return False
            deadline = monotonic() + _PATIENCE
            while not synced.wait(_LOOK_SECONDS):
                if monotonic() > deadline:
                    logger.warning("no weight sync within %g s after the agreement", _PATIENCE)
                    break
                if self._agreed_in_vain(before):
                    logger.warning("the agreement was in vain: no task had two finished episodes")
                    break
        return True

    def _agreed_in_vain(self, syncs: int) -> bool:
        """Whether the agreement of this client is over without a sync; there had been ``syncs`` before."""
        try:
            status = self.status(episodes=0, steps=0)
        except StateError:
            # this client was closed
            raise
        except SwarmGatewayError:
            # a server that is away, or a proxy before it, may come back, and a token be known again
            return False
        rolls = status.engine.engine_status is EngineState.ROLLING and status.training_seconds is None
        agrees = any(row.agreed for row in status.clients if row.client_uuid == self.client_uuid)
        return rolls and not agrees and status.weight_syncs == syncs


class Dataset(Protocol):
    """What gives training tasks."""

    def generate_training_tasks(self) -> Iterable[Task]:
        """The tasks, one by one."""
        ...


def run_episodes_until_all_complete(
    tasks: Iterable[ItemT],
    func: Callable[[ItemT], ResultT],
    max_workers: int | None = None,
    auto_retry: bool | int = True,
) -> list[ResultT | None]:
    """Call ``func`` with each task, in ``max_workers`` threads (default: one for each); an episode that it begins and
    does not end is aborted.

    Args:
        auto_retry: ``True`` tries a task up to three times, a number that many times, ``False`` once.

    Returns:
        What ``func`` returned, in the order of the tasks; ``None`` where it failed for good (logged).

    Raises:
        ExceptionGroup: every task failed.
    """
    items = list(tasks)
    if not items:
        return []
    with PeriodicDrainThreadPoolExecutor[ResultT](len(items), max_workers, auto_retry) as pool:
        futures = [pool.submit(func, item) for item in items]
        wait(futures)
    errors = [exc for future in futures if isinstance(exc := future.exception(), Exception)]
    if len(errors) == len(items):
        raise AllFailedError(f"all {len(items)} tasks failed", errors)
    return [None if future.exception() else future.result() for future in futures]


def auto_train_with_dataset(
    dataset: Dataset,
    swarm_worker: SwarmClient,
    execute_agent: Callable[[Task, OpenaiBaseUrlAndApiKey], WorkflowOutput],
    local_grpo_n: int = 2,
    remote_batch_size: int = 8,
) -> None:
    """Run ``local_grpo_n`` episodes of ``execute_agent`` for each of the dataset's training tasks, once."""
    swarm_worker.check_group_size(local_grpo_n)

    def rollout(task: Task) -> float | list[float] | None:
        episode_uuid, api = swarm_worker.begin_episode()
        output = execute_agent(task, api)
        swarm_worker.end_episode(task, episode_uuid, output)
        return output.reward

    with PeriodicDrainThreadPoolExecutor[Any](remote_batch_size * local_grpo_n, _TRAIN_PARALLEL) as pool:
        for task in dataset.generate_training_tasks():
            for _ in range(local_grpo_n):
                pool.submit_with_periodic_drain(rollout, task)
