"""Starts and stops the engine, and drives the server's state by what the engine says over the link.

Invariant: whatever ends a run (Stop, exit, silence, a boot that takes too long), the state goes to OFFLINE with the
reason at once, and no other run starts while a process of this one is left. Until then the server reads the engine's
messages: it records a step however late its message comes, and only afterwards does an error count against the batch.
Where vLLM outlives its trainer, the run goes on with another trainer, up to ``MAX_RESTARTS`` times without a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from swarm.concurrency import end_tasks, first_of
from swarm.errors import ConfigError, EngineError, LinkError, StateError, UnavailableError
from swarm.importer import python_path
from swarm.job import TrainJob, dump_job
from swarm.link.imported import CODE_VARIABLE, differences
from swarm.link.messages import (
    BatchReady,
    BootProgress,
    CodeImported,
    Goodbye,
    Message,
    ResolvedConfig,
    Resume,
    RolloutReady,
    StartTrainer,
    StepDone,
    Stop,
    TrainerDied,
    Warned,
    WeightsSynced,
    WeightSync,
)
from swarm.link.server import EngineLink
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.engine.history import History
from swarm.server.engine.process import TOKEN_VARIABLE, EngineProcess
from swarm.server.engine.snapshots import Snapshots, Stored
from swarm.states import EngineState
from swarm.status import MAX_RESTARTS

logger = logging.getLogger(__name__)

#: longest wait for what an engine that is gone said last, which may still be in its sockets
_LAST_WORDS_SECONDS = 0.3

ENGINE_COMMAND = (sys.executable, "-m", "adapters.verl")


class Supervisor:
    """Owns at most one engine run.

    Args:
        command: the engine's command; the path of the job's YAML is appended.
        restart_pause: seconds before another trainer starts, see :meth:`EngineFailure.pause`.
    """

    def __init__(
        self,
        config: ServerConfig,
        controller: Controller,
        command: Sequence[str] | None = None,
        restart_pause: float = 2.0,
    ) -> None:
        self._config = config
        self._restart_pause = restart_pause
        self._controller = controller
        self._command = tuple(command or ENGINE_COMMAND)
        self._run: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        # the synced code for the engine; `board.code` is set once the engine's processes say that they import it
        self._code: Stored | None = None
        self._snapshots = Snapshots(config.run_dir)
        self._history = History(config.run_dir)

    async def start(self) -> int:
        """Start the engine with the synced job; returns the process id of its driver.

        Raises:
            ConflictError: no job, or the engine is not OFFLINE.
            ConfigError: the job's model path does not exist.
            EngineError: the process could not be started.
        """
        engine = self._controller.engine
        if self._run is not None and engine.state is EngineState.OFFLINE:
            # dead, but its processes are still being cleaned away: bounded by the grace
            await asyncio.shield(self._run)
        engine.check_offline("start it again")
        check_model(self._controller.job)
        job = self._controller.boot()
        self._stop = asyncio.Event()
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._run = asyncio.create_task(self._supervise(job, started), name="engine-run")
        return await asyncio.shield(started)

    async def stop(self, *, for_good: bool = False) -> None:
        """Stop the engine and wait until nothing is left of it; does nothing when it is OFFLINE.

        ``for_good`` ends the training run as well, also one whose engine has crashed, see
        :meth:`Controller.run_stopped`.
        """
        if for_good:
            self._controller.run_stopped()
        run = self._run
        if run is None:
            return
        self._stop.set()
        # several callers may wait for one stop, and none of them may take it down by leaving
        await asyncio.shield(run)

    async def _supervise(self, job: TrainJob, started: asyncio.Future[int]) -> None:
        controller = self._controller
        reason, lines, no_room = "the engine could not be started", list[str](), False
        goodbye: asyncio.Future[Goodbye] = asyncio.get_running_loop().create_future()
        try:
            # a crash must not make us forget for which run the engine runs
            await controller.episodes.synced()
            async with EngineLink(token := secrets.token_urlsafe(32), self._config.heartbeat_timeout) as link:
                process = await self._spawn(job, link, token)
                controller.engine.pid = process.pid
                started.set_result(process.pid)
                try:
                    reason = await self._drive(link, process, goodbye)
                finally:
                    asked_for = self._stop.is_set()
                    last = goodbye.result() if goodbye.done() else None
                    if not asked_for and (last is None or last.error):
                        wrong_config, cause = (last.wrong_config, last.cause) if last is not None else (False, "")
                        controller.engine.died(reason, wrong_config=wrong_config, cause=cause)
                    controller.offline(f"{reason}; its processes are being ended", process.last_lines())
                    await self._end(link, process)
                    if last is not None and last.error and not asked_for:
                        controller.engine_failed(last.error)
                    # what it wrote while it went down may hold the cause
                    lines = [] if asked_for else process.last_lines()
        except (OSError, UnavailableError) as exc:
            reason = f"the engine could not be started: {exc}"
            no_room = isinstance(exc, UnavailableError) or exc.errno in (errno.ENOSPC, errno.EDQUOT)
        except asyncio.CancelledError:
            reason = "the swarm server was shut down"
            raise
        except Exception as exc:
            logger.exception("the engine's supervision failed")
            reason = f"internal error while supervising the engine: {type(exc).__name__}: {exc}"
        finally:
            self._run = None
            if not started.done():
                controller.engine.died(reason, counts=not no_room)
                started.set_exception(EngineError(reason))
            controller.offline(reason, lines)
            self._history.end(reason)

    async def _end(self, link: EngineLink, process: EngineProcess) -> None:
        hearing = asyncio.create_task(self._hear_out(link), name="engine-last-words")
        try:
            evaluations = self._controller.take_evaluations()
            for role in link.roles:
                with contextlib.suppress(LinkError):
                    await link.send(role, Stop(evaluations=evaluations if role == "rollout" else []))
            # an engine that has not said Hello yet does not listen for a Stop
            connected = bool(link.roles)
            await process.end(self._config.stop_grace if connected else 0.0)
        finally:
            await end_tasks(hearing)
        for message in await link.last_words(_LAST_WORDS_SECONDS):
            self._record(message)

    async def _hear_out(self, link: EngineLink) -> None:
        while True:
            # its silence is no news any more
            with contextlib.suppress(LinkError):
                self._record((await link.receive())[1])

    def _record(self, message: Message) -> None:
        """Record the step that an engine reports which is being ended."""
        if isinstance(message, StepDone):
            self._controller.step_done(message.result)

    async def _spawn(self, job: TrainJob, link: EngineLink, token: str) -> EngineProcess:
        run_dir = self._config.run_dir.resolve()
        run_dir.mkdir(parents=True, exist_ok=True)
        job_path = run_dir / "job.yaml"
        job_path.write_text(dump_job(job))
        self._code = self._snapshots.selected() if self._config.allow_code_sync else None
        self._history.begin(self._controller.run.run_id, job, self._code and self._code.id)
        environ = engine_environment(link.address, token, run_dir, self._folder)
        return await EngineProcess.start((*self._command, str(job_path)), environ, run_dir)

    @property
    def _folder(self) -> Path | None:
        return self._snapshots.files(self._code.id) if self._code is not None else None

    async def _drive(self, link: EngineLink, process: EngineProcess, goodbye: asyncio.Future[Goodbye]) -> str:
        """Run until the engine is to be ended; the reason, for people. ``goodbye`` is what the engine says of it."""
        feed = self._feed(link)
        try:
            while True:
                listening = self._listen(link, goodbye)
                ended = await first_of(self._stopped(), self._exited(process, goodbye), listening, feed)
                if not isinstance(ended, TrainerDied):
                    return ended
                job = self._controller.trainer_died(ended.error)
                link.forget("rollout")
                failure = self._controller.engine.failure
                assert failure is not None
                if failure.unexplained > MAX_RESTARTS:
                    return f"{failure.reason} (after {MAX_RESTARTS} other trainers that did no training step)"
                feed = self._start_trainer(link, job, failure.pause(self._restart_pause))
        except (LinkError, StateError) as exc:
            return exc.message

    async def _start_trainer(self, link: EngineLink, job: TrainJob, pause: float) -> str:
        await asyncio.sleep(pause)
        await link.send("driver", StartTrainer(resume=job.resume))
        return await self._feed(link)

    async def _stopped(self) -> str:
        await self._stop.wait()
        return "stopped"

    async def _exited(self, process: EngineProcess, goodbye: asyncio.Future[Goodbye]) -> str:
        how = await process.wait()
        await asyncio.wait({goodbye}, timeout=_LAST_WORDS_SECONDS)
        return _reason(goodbye.result()) if goodbye.done() else how

    async def _listen(self, link: EngineLink, goodbye: asyncio.Future[Goodbye]) -> str | TrainerDied:
        controller = self._controller
        loop = asyncio.get_running_loop()
        deadline: float | None = loop.time() + self._config.boot_timeout
        lost: TrainerDied | None = None
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    _, message = await link.receive()
            except TimeoutError:
                if lost is not None:
                    return lost
                if goodbye.done():
                    return _reason(goodbye.result())
                seconds = self._config.boot_timeout
                return f"the engine did not boot within {seconds:g} s; it was at: {controller.engine.boot_stage}"
            match message:
                case BootProgress(stage=stage, detail=detail):
                    controller.engine.progress(stage, detail)
                case Warned(text=text):
                    controller.engine.warn(text)
                case ResolvedConfig(config=config):
                    controller.engine.resolved_config = config
                    self._history.resolved(config)
                case CodeImported(processes=processes) if self._code is not None and self._folder is not None:
                    if differing := differences(self._folder, self._code.digest, processes):
                        return f"the engine does not run the synced code in {self._folder}: {differing}"
                    controller.engine.code = self._code.id
                    logger.info("%s import the synced code in %s", " and ".join(processes), self._folder)
                case RolloutReady() if self._code is not None and controller.engine.code is None:
                    return (
                        f"the engine does not tell whether it runs the synced code in {self._folder}: if that holds "
                        "the packages swarm or adapters, sync those of this server's version"
                    )
                case RolloutReady():
                    deadline = deadline if goodbye.done() or lost is not None else None
                    if (again := controller.rollout_ready(message)) is not None:
                        await link.send("rollout", BatchReady(batch=again, newest_step=controller.newest_step))
                case WeightSync():
                    controller.weight_sync_begins()
                case WeightsSynced(policy_version=version, sampled=sampled):
                    controller.weights_synced(version, sampled)
                    await link.send("rollout", Resume())
                case StepDone(result=result):
                    controller.step_done(result)
                case TrainerDied(error=error):
                    if not controller.engine.states.outlives_trainer:
                        return f"the engine failed: {error}"
                    lost, deadline = message, loop.time() + _LAST_WORDS_SECONDS
                case Goodbye(error=error):
                    if not goodbye.done():
                        if not error and not self._stop.is_set():
                            controller.run_stopped()
                        goodbye.set_result(message)
                    # no longer: nothing serves by now, and cleaning up may take the driver as long as it likes
                    deadline = loop.time() + _LAST_WORDS_SECONDS
                case _:
                    pass

    async def _feed(self, link: EngineLink) -> str:
        while True:
            batch = await self._controller.next_batch()
            evaluations, newest = self._controller.take_evaluations(), self._controller.newest_step
            message = BatchReady(batch=batch, evaluations=evaluations, newest_step=newest)
            # to a trainer that is gone: the driver is about to say so, or its silence will
            with contextlib.suppress(LinkError):
                await link.send("rollout", message)


def engine_environment(link_address: str, token: str, run_dir: Path, code: Path | None) -> dict[str, str]:
    """Variables of the engine's process; it imports from ``code`` first, and from its working directory never."""
    environ = {
        **os.environ,
        "SWARM_LINK_ADDRESS": link_address,
        TOKEN_VARIABLE: token,
        "SWARM_RUN_DIR": str(run_dir),
        "PYTHONUNBUFFERED": "1",
        # the working directory stays, because relative paths in jobs start from it. A variable and no flag: Ray, vLLM
        # and verl start Python themselves.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": python_path(*([code] if code else [])),
    }
    # the engine has no business with the control routes; transformers reads its own docstrings, and verl asserts
    for name in ("SWARM_TOKEN", "SWARM_PRIVATE_TOKEN", CODE_VARIABLE, "PYTHONOPTIMIZE"):
        environ.pop(name, None)
    return environ | ({CODE_VARIABLE: str(code)} if code else {})


def _reason(goodbye: Goodbye) -> str:
    return f"the engine failed: {goodbye.error}" if goodbye.error else "the training run is finished"


def check_model(job: TrainJob) -> None:
    """Refuse a model that is plainly meant as a local path and is not there.

    Raises:
        ConfigError: says which path.
    """
    path = Path(os.path.expanduser(job.model))
    looks_local = job.model.startswith(("/", ".", "~")) or job.model.count("/") > 1
    if looks_local and not path.is_dir():
        raise ConfigError(
            f"model: there is no folder {path}; give the path of a model, a hub name, or a name that "
            "`swarm-gateway models pull` knows",
            param="model",
        )
