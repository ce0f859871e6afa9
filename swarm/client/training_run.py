"""``DatasetTraining``: the episodes of one training, until its steps are done, and its evaluations.

Invariant: an episode is counted once, as finished or as failed; when the last step is done nothing new is begun and
what runs may finish. While an evaluation is due or runs, no train episode is begun; those that run then may still make
a batch, and what the weights after its step answer of the evaluation counts for these.
"""

from __future__ import annotations

import asyncio
import logging
import random
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from statistics import fmean
from typing import TypeVar

from swarm.client.asynchronous import AsyncSwarmClient
from swarm.client.calls import OpenClaims
from swarm.client.episodes import AllFailedError, attempts_of, own_errors, sweep, with_retries
from swarm.client.portal import each_in_thread
from swarm.client.throttling import as_policy
from swarm.client.training_options import EvaluationReport, Progress, TrainOptions, TrainReport
from swarm.client.wire import EpisodeEndpoint, RetryPolicy
from swarm.errors import ConfigError, ConflictError, UnavailableError
from swarm.measures import SHUFFLED
from swarm.states import EngineState
from swarm.status import ServerStatus
from swarm.types import Task, WorkflowOutput

logger = logging.getLogger(__name__)

#: Most episodes at once by default: in threads, each has one.
MAX_PARALLEL = 256

#: Claims or ends of one episode while no server answers, each with its client's retries: half an hour by default. Then
#: it is gone, and what else is claimed or ended is no longer waited for, unless one answers.
_MOST_IN_VAIN = 30

T = TypeVar("T")

Execute = Callable[[Task, EpisodeEndpoint], Awaitable[WorkflowOutput]]

#: States in which no step is computed.
_AT_REST = (EngineState.ROLLING, EngineState.BOOTING, EngineState.OFFLINE)
_AWAY = (EngineState.BOOTING, EngineState.OFFLINE)


class _TakenBackError(Exception):
    """A claim is not to wait any more."""


class DatasetTraining:
    """The episodes of one training, and their counts; ``num_repeat`` of each task."""

    def __init__(self, status: ServerStatus, options: TrainOptions) -> None:
        job = status.job
        if job is None:
            raise ConflictError("the swarm server has no job: auto_sync_train_config_and_start_engine first")
        self._options = options
        self.num_repeat = options.num_repeat or job.num_repeat
        if self.num_repeat < job.num_repeat and (status.pool is None or status.pool.whole_groups):
            warnings.warn(
                f"num_repeat is {self.num_repeat}, and the job trains groups of {job.num_repeat} episodes of one task: "
                "a task is trained once as many of its episodes have ended, in other epochs or at other clients",
                RuntimeWarning,
                stacklevel=2,
            )
        self._max_parallel = options.max_parallel or min(job.slots, MAX_PARALLEL)
        if options.shuffle_rewards and self._max_parallel < self.num_repeat:
            raise ConfigError(
                f"the {self.num_repeat} episodes of a task exchange their rewards, so they run at once: "
                f"{self._max_parallel} at most (max_parallel) are too few"
            )
        self._attempts = attempts_of(options.auto_retry)
        self._status = status
        self._first = self._step = status.engine.global_step
        self._last = job.total_training_steps
        if options.total_steps is not None:
            self._last = min(self._last, self._first + options.total_steps)
        self._stopping = False
        #: whether train episodes, and whether any episodes, may begin
        self._open, self._served = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._served.set()
        self._claims = OpenClaims()
        self._evaluated = -1
        self._evaluating: asyncio.Task[None] | None = None
        #: the step of the evaluation that runs
        self._due_step = 0
        self._broken: BaseException | None = None
        self._finished = 0
        self._rewards = 0.0
        self._failures = 0
        #: why the server does not train the last end of which it said so
        self._untrained = ""
        #: of the episodes that failed in a row; more than one bad task
        self._errors: list[Exception] = []
        self._most_errors = max(self._max_parallel, 2 * self.num_repeat)
        self._gave_up = False
        #: whether the server has been waited for in vain
        self._gone = False

    async def run(self, client: AsyncSwarmClient, tasks: AsyncGenerator[Task], execute: Execute) -> TrainReport:
        """Run an episode for each of ``tasks``, with shuffled rewards a group, until the last step is done."""
        self._client, self._execute = client, execute
        shuffled = self._options.shuffle_rewards

        async def until_stopped() -> AsyncGenerator[Task]:
            try:
                async with aclosing(tasks):
                    while not self._stopping and (task := await anext(tasks, None)) is not None:
                        for _ in range(1 if shuffled else self.num_repeat):
                            yield task
            except Exception:
                # what runs may finish
                self._stop()
                raise

        async def work(_: int, task: Task) -> None:
            try:
                outputs = await self._run_shuffled(task) if shuffled else [await self._run(task, self._begin_train)]
            except Exception as exc:
                for _ in range(self.num_repeat if shuffled else 1):
                    self._count_failure(exc)
            else:
                for output in outputs:
                    self._count(output.reward)

        self._show()
        async with client.watching_status(self._follow) as status:
            self._status = status
            self._look()
            try:
                at_once = self._max_parallel // self.num_repeat if shuffled else self._max_parallel
                await sweep(until_stopped(), work, at_once)
                # an evaluation that runs is the last one: others may train for days
                self._stopping = True
            except asyncio.CancelledError:
                self._stop()
                if self._evaluating is not None:
                    self._evaluating.cancel()
                raise
            finally:
                while self._evaluating is not None:
                    await asyncio.wait([self._evaluating])
        if self._broken is not None:
            raise self._broken
        if self._failures and not self._finished:
            raise ExceptionGroup(f"all {self._failures} episodes failed", self._errors)
        # those that run when the last step is done may fail
        if self._gave_up and self._step < self._last:
            raise ExceptionGroup(f"{len(self._errors)} episodes in a row failed", self._errors)
        return TrainReport(
            finished=self._finished,
            failed=self._failures,
            mean_reward=self._mean,
            first_step=self._first,
            last_step=self._step,
        )

    # ------------------------------------------------------------------ episodes

    async def _run(self, task: Task, begin: Callable[[Task], Awaitable[EpisodeEndpoint]]) -> WorkflowOutput:
        """Run one episode, and return what the agent did."""

        async def run() -> WorkflowOutput:
            api = await begin(task)
            output = await own_errors(self._execute(task, api))
            ended = await self._answered(lambda: self._client.end_episode(task, api.episode_uuid, output))
            self._see_end(task, ended)
            return output

        return await self._tried(task, run)

    async def _run_shuffled(self, task: Task) -> list[WorkflowOutput]:
        """Run the episodes of one task, and end them with each other's rewards.

        They are claimed and ended at once, and all of them run again if one fails: rewards that waited for an episode
        which cannot be claimed before the next step would hold up that step, and be lost with it.
        """

        async def run() -> list[WorkflowOutput]:
            episodes = await self._claimed(task, self.num_repeat)
            running = [asyncio.ensure_future(own_errors(self._execute(task, api))) for api in episodes]
            await asyncio.gather(*running, return_exceptions=True)
            done = [task.result() for task in running]
            rewards = random.sample([output.reward for output in done], len(done))
            outputs = zip(episodes, done, rewards, strict=True)
            ends = {
                api.episode_uuid: output.model_copy(
                    update={"reward": reward, "log_metrics": {SHUFFLED: 1.0} | output.log_metrics}
                )
                for api, output, reward in outputs
            }
            self._see_end(task, await self._answered(lambda: self._client.end_group(task, ends)))
            return done

        return await self._tried(task, run)

    async def _tried(self, task: Task, run: Callable[[], Awaitable[T]]) -> T:
        """What ``run`` returns in one of the tries; episodes that a try does not end are aborted."""
        return await with_retries(lambda: self._client.run_tracked(run()), self._attempts, RetryPolicy(), task.task_id)

    async def _begin_eval(self, _: Task) -> EpisodeEndpoint:
        await self._served.wait()
        return (await self._answered(lambda: self._client.begin_episode(episode_type="eval")))[1]

    async def _begin_train(self, task: Task) -> EpisodeEndpoint:
        return (await self._claimed(task, None))[0]

    async def _claimed(self, task: Task, count: int | None) -> Sequence[EpisodeEndpoint]:
        """One train episode, or ``count`` of them at once."""
        throttle = as_policy(self._options.throttle_policy, task.task_id)

        async def claim() -> Sequence[EpisodeEndpoint]:
            if count is None:
                return [(await self._client.begin_episode(throttle_policy=throttle))[1]]
            return await self._client.claim_group(count, None, throttle_policy=throttle)

        while True:
            while not self._open.is_set():
                # it may be closed again before this goes on
                await self._open.wait()
            if self._stopping:
                raise asyncio.CancelledError
            # what is taken back for an evaluation is claimed again behind it
            with suppress(_TakenBackError), self._claims.waiting():
                return await self._answered(claim)

    async def _answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """What ``call`` gets, made again while no server answers: that is no fault of the task, which has few tries."""
        in_vain = 0
        while True:
            try:
                answer = await call()
            except UnavailableError as exc:
                if exc.code != "server_unreachable":
                    raise
                in_vain += 1
                if self._gone or in_vain > _MOST_IN_VAIN:
                    self._gone = True
                    raise
            else:
                self._gone = False
                return answer

    def _count(self, reward: float) -> None:
        self._finished += 1
        self._rewards += reward
        if not self._gave_up:
            self._errors.clear()
        self._show()

    def _count_failure(self, error: Exception) -> None:
        self._failures += 1
        if len(self._errors) < self._most_errors:
            self._errors.append(error)
        self._show()
        if len(self._errors) == self._most_errors and not self._stopping:
            self._gave_up = True
            self._stop()

    def _see_end(self, task: Task, untrained: str) -> None:
        """Tell once why ends are taken and not trained: the counts look well, and no step ever comes."""
        if untrained and untrained != self._untrained:
            self._untrained = untrained
            logger.warning("an end of the task %r is taken, and %s", task.task_id, untrained)

    @property
    def _mean(self) -> float | None:
        return self._rewards / self._finished if self._finished else None

    def _show(self) -> None:
        self._options.on_progress(
            Progress(
                step=self._step,
                first_step=self._first,
                last_step=self._last,
                finished=self._finished,
                failed=self._failures,
                mean_reward=self._mean,
                evaluating=self._evaluating is not None,
            )
        )

    # ------------------------------------------------------------------ steps and evaluations

    async def _follow(self, status: ServerStatus) -> None:
        self._status = status
        self._look_again()

    def _look_again(self) -> None:
        try:
            self._look()
        except Exception as exc:
            # nobody else would hear of it, and the last step never be seen
            self._broken = exc
            self._stop()

    def _look(self) -> None:
        """Do what follows from the latest status."""
        status = self._status
        state, step = status.engine.engine_status, status.engine.global_step
        self._step = max(self._step, step)
        away = self._options.patient and state in _AWAY
        self._served.clear() if away else self._served.set()
        if state is EngineState.ROLLING:
            # what was measured of weights that are lost is none of those that come again
            self._evaluated = min(self._evaluated, step)
        if self._evaluating is not None and state is EngineState.ROLLING and step < self._due_step:
            # an engine that died went back: it does these steps again, and then they are evaluated
            self._evaluating.cancel()
        elif self._evaluating is None and not self._stopping:
            # an engine that died may go back, and do its last steps again
            done = step >= self._last
            awaited = away and status.engine_failure is not None
            computing = status.training_seconds is not None or state not in _AT_REST
            if state is EngineState.ROLLING and self._is_due(step):
                self._close()
                self._due_step = step
                self._evaluating = asyncio.create_task(self._evaluate(step))
                self._evaluating.add_done_callback(self._evaluation_over)
                self._show()
            elif done and (not self._is_due(self._last) or (state is EngineState.OFFLINE and not awaited)):
                self._stop()
            elif done or away or (computing and self._is_due(step + 1)):
                # the next step is evaluated before another one can follow it
                self._close()
            else:
                self._open.set()
        self._show()

    def _is_due(self, step: int) -> bool:
        evaluation = self._options.evaluation
        if evaluation is None or step <= self._evaluated:
            return False
        return self._evaluated < 0 or step % evaluation.every_steps == 0 or step >= self._last

    async def _evaluate(self, step: int) -> None:
        evaluation = self._options.evaluation
        assert evaluation is not None

        def tasks() -> Iterator[Task]:
            for task in evaluation.dataset():
                yield from [task] * evaluation.samples

        async def work(_: int, task: Task) -> WorkflowOutput:
            return await self._run(task, self._begin_eval)

        try:
            results = await sweep(each_in_thread(tasks()), work, self._max_parallel)
        except AllFailedError as exc:
            results = [None] * len(exc.exceptions)
        outputs = [output for output in results if output is not None]
        self._evaluated = step
        successes = [output.is_success for output in outputs if output.is_success is not None]
        report = EvaluationReport(
            step=step,
            finished=len(outputs),
            failed=len(results) - len(outputs),
            mean_reward=fmean(output.reward for output in outputs) if outputs else None,
            success_rate=fmean(successes) if successes else None,
        )
        evaluation.on_done(report)

    def _evaluation_over(self, evaluating: asyncio.Task[None]) -> None:
        self._evaluating = None
        if not evaluating.cancelled():
            self._broken = self._broken or evaluating.exception()
        if self._broken is not None:
            self._stop()
        # others may have trained meanwhile, or the engine may have gone back
        self._look_again()

    def _close(self) -> None:
        """Begin no train episodes for now, and take back the claims that wait."""
        self._open.clear()
        self._claims.end(_TakenBackError)
        self._claims = OpenClaims()

    def _stop(self) -> None:
        """Begin no more episodes, and give up the claims that wait."""
        self._stopping = True
        self._open.set()
        self._served.set()
        self._claims.end(_TakenBackError)
