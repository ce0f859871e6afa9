"""``train``: tasks, a workflow and a job from one file; a swarm server and an engine for as long as that takes.

The file has ``job`` (``TrainJob``), ``workflow``, ``tasks``, and if needed ``eval``, ``control`` and ``swarm``
(``ServerConfig``). Relative paths start from its folder. Tasks are read as they are needed, again and again, until the
job's last step; the policy is evaluated before the first one, after each ``every_steps``, and after the last.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from gateway.launch.plan import ServerPlan, UpPlan
from gateway.launch.watch import OnEvent, UpFailedError
from gateway.reports.report import TrainingReport, points_of_evaluations, points_of_steps
from swarm.client import RetryPolicy, SwarmClient
from swarm.client.training import begin_training
from swarm.client.training_options import Evaluation, EvaluationReport, Progress, TrainOptions
from swarm.client.workflow import Execute, find_workflow
from swarm.data import epochs_of, located, read_tasks
from swarm.errors import ConfigError, SwarmGatewayError
from swarm.measures import TASKS
from swarm.status import ServerStatus
from swarm.types import Model

_TRACE_LINES = 8
_POLL = 0.2


class TaskSources(Model):
    """Where tasks are read from: a ``.jsonl`` or ``.parquet`` file, ``hf:NAME[@CONFIG][:split]``, or
    ``module:function``."""

    train: str = Field(description="file, hf:NAME[@CONFIG][:split] or module:function")
    validation: str | None = Field(default=None, description="the same, for evaluations")


class EvalConfig(Model):
    """When and how much is evaluated."""

    every_steps: int = Field(ge=1, description="steps between two evaluations")
    samples: int = Field(default=1, ge=1, description="episodes of each validation task")
    tasks: int | None = Field(default=None, ge=1, description="the first so many validation tasks; default: all")


class TrainFile(Model):
    """The file of ``train``; ``job`` and ``swarm`` are checked by their own models."""

    job: dict[str, Any] = Field(description="as for `up`")
    workflow: str = Field(description="module:function, or module:Class in AgentJet's form")
    tasks: TaskSources = Field(description="where tasks are read from")
    eval: EvalConfig | None = Field(default=None, description="evaluations; none: there are none")
    control: Literal["none", "shuffle"] = Field(
        default="none", description="shuffle: rewards are permuted within each task, a control that must not learn"
    )
    swarm: dict[str, Any] = Field(default={}, description="as for `up`")


@dataclass(frozen=True)
class TrainPlan:
    """What ``train`` runs; ``train`` and ``validation`` are as :func:`swarm.data.read_tasks` takes them."""

    file: TrainFile
    up: UpPlan
    workflow: Execute
    train: str | Path
    validation: str | Path | None

    @property
    def server(self) -> ServerPlan:
        """The one that trains."""
        return self.up.servers[0]


def train_plan(file: TrainFile, up: UpPlan, folder: Path) -> TrainPlan:
    """The plan of ``file``, whose paths start from ``folder``; its modules can be imported already.

    Raises:
        ConfigError: the workflow does not load, tasks cannot be read, or there is nothing to evaluate on.
    """
    if file.eval is not None and file.tasks.validation is None:
        raise ConfigError("eval needs tasks.validation: name the tasks that it tries")
    if up.servers[0].job.by_agreement:
        raise ConfigError(
            "job.collection: every batch would wait until somebody agrees, and nobody does in `train`: name another"
        )
    train = located(file.tasks.train, folder)
    validation = located(file.tasks.validation, folder) if file.tasks.validation and file.eval else None
    for source in filter(None, (train, validation)):
        if next(read_tasks(source), None) is None:
            raise ConfigError(f"{source} holds no task")
    # the engine serves on after its last step, to be evaluated
    up = _with_job(up, serve_after_training=file.eval is not None)
    return TrainPlan(file, up, find_workflow(file.workflow), train, validation)


def rehearsal(plan: TrainPlan) -> TrainPlan:
    """``plan`` with two training steps, few tasks at each evaluation, and a run folder of its own, ``quick`` in the
    plan's: no run goes on from it, and it touches no checkpoint of another one."""
    evaluated = plan.file.eval and plan.file.eval.model_copy(update={"every_steps": 2, "samples": 1, "tasks": 4})
    file = plan.file.model_copy(update={"eval": evaluated})
    up = _with_job(plan.up, total_training_steps=2, save_freq=-1, checkpoint_dir=None)
    [server] = up.servers
    run_dir = server.run_dir / "quick"
    server = replace(server, run_dir=run_dir, swarm_section=server.swarm_section | {"run_dir": str(run_dir)})
    return replace(plan, file=file, up=replace(up, servers=(server,), earlier_run="replace"))


def _with_job(up: UpPlan, **changes: Any) -> UpPlan:
    """``up`` with other fields of its job."""
    [server] = up.servers
    return replace(up, servers=(replace(server, job=server.job.model_copy(update=changes)),))


class TrainCommand:
    """The work of ``train`` beside the servers, see :func:`gateway.launch.up.run_up`.

    Args:
        plan: what to train.
        on_event: called with ``evaluating`` and ``evaluation``, and their values.
        label: of the report.

    Attributes:
        report: once the work is over; ``None`` if it never began.
    """

    def __init__(self, plan: TrainPlan, on_event: OnEvent, label: str = "run") -> None:
        self._plan = plan
        self._on_event = on_event
        self._label = label
        self._progress: Progress | None = None
        #: the step of the evaluation that runs
        self._evaluating: int | None = None
        self.report: TrainingReport | None = None

    def __call__(self, url: str, token: str, stopping: threading.Event) -> None:
        """Train until the last step, or until ``stopping`` is set.

        Raises:
            ConfigError: tasks cannot be read.
            UpFailedError: all episodes fail, or the user's tasks do.
        """
        began = time.monotonic()
        because = "interrupted"
        # nobody starts this server again: the report does not wait for one that is gone as long as others do
        policy = RetryPolicy(attempts=8)
        with SwarmClient(url, token, self._plan.up.client_name, policy=policy) as client:
            status = client.status()
            call = begin_training(self._tasks(client, status), client, self._plan.workflow, self._options())
            try:
                while not call.done(_POLL):
                    if stopping.is_set():
                        call.cancel()
                        break
                    if self._progress is not None and self._progress.step > status.engine.global_step:
                        status = _status_now(client, status)
                call.result()
                because = "all steps are done"
            except CancelledError:
                pass
            except ExceptionGroup as exc:
                because = exc.message
                raise self._failed(f"{because}, the first with: {exc.exceptions[0]}", exc.exceptions[0]) from exc
            except SwarmGatewayError as exc:
                because = exc.message
                raise
            except Exception as exc:
                # mostly of the user's tasks
                because = f"{type(exc).__name__}: {exc}"
                raise self._failed(because, exc) from exc
            finally:
                self.report = self._reported(_status_now(client, status), time.monotonic() - began, because)

    def _tasks(self, client: SwarmClient, status: ServerStatus) -> Any:
        job = self._plan.server.job
        # a run that goes on does not begin its tasks anew
        done = _tasks_done(client, status.engine.global_step, job.batch_size)
        return itertools.islice(epochs_of(self._plan.train, job.seed), done, None)

    def _options(self) -> TrainOptions:
        file, source = self._plan.file, self._plan.validation
        evaluation: Evaluation | None = None
        if file.eval is not None and source is not None:
            most = file.eval.tasks
            evaluation = Evaluation(
                lambda: itertools.islice(read_tasks(source), most),
                file.eval.every_steps,
                file.eval.samples,
                self._evaluated,
            )
        return TrainOptions(
            evaluation=evaluation,
            shuffle_rewards=file.control == "shuffle",
            patient=True,
            on_progress=self._see,
        )

    def _see(self, progress: Progress) -> None:
        if progress.evaluating and not (self._progress and self._progress.evaluating):
            self._evaluating = progress.step
            self._on_event("evaluating", {"step": progress.step})
        self._progress = progress

    def _evaluated(self, report: EvaluationReport) -> None:
        self._evaluating = None
        self._on_event("evaluation", report.model_dump(mode="json"))

    def _failed(self, message: str, exc: Exception) -> UpFailedError:
        lines = "".join(traceback.format_exception(exc)).splitlines()
        return UpFailedError(message, lines[-_TRACE_LINES:], self._plan.server.run_dir / "engine.log")

    def _reported(self, status: ServerStatus, seconds: float, because: str) -> TrainingReport:
        progress, file = self._progress, self._plan.file
        return TrainingReport(
            label=self._label,
            data=file.tasks.train,
            model=status.model,
            seconds=seconds,
            interrupted=because == "interrupted",
            stopped_because=because,
            steps=points_of_steps(status.steps),
            # of one that was interrupted, some episodes may be counted
            evaluations=points_of_evaluations(
                evaluation for evaluation in status.evaluations if evaluation.step != self._evaluating
            ),
            workflow=file.workflow,
            control=file.control,
            finished=progress.finished if progress else 0,
            failed=progress.failed if progress else 0,
        )


def _tasks_done(client: SwarmClient, step: int, batch_size: int) -> int:
    """How many tasks the steps up to ``step`` took, also of runs with other jobs; of what the server does not know
    ``batch_size`` each."""
    done = 0
    while step:
        try:
            steps = client.kept_policy(step).steps
        except SwarmGatewayError:
            steps = []
        if not steps:
            return done + step * batch_size
        done += sum(int(result.metrics.get(TASKS, batch_size)) for result in steps)
        step = steps[0].step - 1
    return done


def _status_now(client: SwarmClient, before: ServerStatus) -> ServerStatus:
    """The server's status, or the one ``before`` if the server is gone."""
    try:
        return client.status()
    except SwarmGatewayError:
        return before
