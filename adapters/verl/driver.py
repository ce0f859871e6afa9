"""The engine's main process: prepares one run, starts the trainer in its own Ray cluster, reports how it ended.

Invariant: whatever happens, the server hears one line why, and no process, Ray session or segment of the run is left.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapters.verl.causes import (
    BOOT,
    LAG,
    core_exception,
    forget_deadline,
    innermost,
    is_final,
    passed_deadline,
    root_cause,
)
from adapters.verl.cluster import (
    RayFolder,
    code_imported,
    init_arguments,
    kill_processes,
    remove_leftovers,
    start_ray,
)
from adapters.verl.health import NodeWatch, missing_cluster, missing_nodes
from adapters.verl.meeting import RUN_VARIABLE
from adapters.verl.output import spare_output
from adapters.verl.preloaded import start_preloading
from swarm.errors import ConfigError, EngineError, LinkError, SwarmGatewayError
from swarm.job import ServingMode, TrainJob, parse_job
from swarm.link.engine import ADDRESS_VARIABLE, TOKEN_VARIABLE, EngineEnd
from swarm.link.imported import CODE_VARIABLE
from swarm.link.messages import BootProgress, Goodbye, ResolvedConfig, StartTrainer, Stop, TrainerDied
from swarm.machine import CURE, GPU_CURE, oom_kills, why_killed
from swarm.validation import read_text

RUN_DIR_VARIABLE = "SWARM_RUN_DIR"
#: in the run folder: what this process and, through Ray, all others of the run print
LOG_NAME = "engine.log"
#: seconds that a Stop leaves to the trainer
STOP_GRACE = 3.0
#: seconds for an orderly end; then the process goes and leaves the rest to the supervisor
EXIT_GRACE = 20.0
#: What Ray raises where a process ended without a word; its text is a list of guesses.
_PROCESS_ENDED = ("ActorDiedError", "RayActorError", "WorkerCrashedError")
#: How much memory the machine had used, of how much, in what Ray says of a process that it ended.
_RAYS_MEMORY = re.compile(r"([\d.]+) ?GB used / ([\d.]+) ?GB")


def main() -> None:
    """Entry point; exit code 0 when the run ended on purpose, 2 for a wrong configuration, else 1."""
    parser = argparse.ArgumentParser(prog="python -m adapters.verl", description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path, help="TrainJob as YAML")
    arguments = parser.parse_args()
    run_dir = Path(os.environ.get(RUN_DIR_VARIABLE) or ".").absolute()
    run = _Run(run_dir)
    spare_output()
    try:
        connected = EngineEnd.from_environment("driver", on_lost=run.abandon)
    except LinkError as exc:
        sys.exit(_complain(exc.message, 2))
    code, error, cause = 0, "", ""
    with connected as link:
        try:
            run.execute(parse_job(read_text(arguments.job, "job"), str(arguments.job)), link)
        except Exception as exc:
            # Ray's errors are of the class of their cause, too
            if isinstance(exc, SwarmGatewayError):
                error, code = exc.message, 2 if isinstance(exc, ConfigError) else 1
            else:
                traceback.print_exc()
                error, code = passed_deadline(run_dir) or run.cause(exc), 1
            if cause := run.core_exception(exc):
                error = f"vLLM died: {_with_cure(cause)}"
        if error:
            _complain(error, code)
        link.send(Goodbye(error=error, wrong_config=code == 2, cause=cause))
        run.clean_up()
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    print(f"engine: {message}", file=sys.stderr, flush=True)
    return code


def _with_cure(error: str) -> str:
    """``error``, with what to do where a GPU's memory was full: of vLLM's errors no more than the text comes here."""
    return f"{error}: {GPU_CURE}" if "out of memory" in error else error


class _Run:
    """One engine run from a job to the end of its processes."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._began = time.time()
        self._log = run_dir / LOG_NAME
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self._ray_folder: RayFolder | None = None
        self._preloaded: subprocess.Popen[bytes] | None = None
        self._terminated = threading.Event()
        self._oom_kills = oom_kills()

    def cause(self, exc: BaseException) -> str:
        """:func:`root_cause`, with what to do where that was lack of memory, as far as it is known."""
        cause = innermost(exc)
        # of Ray, whose monitor kills before the kernel does, with a page of advice
        if type(cause).__name__ == "OutOfMemoryError" and (used := _RAYS_MEMORY.search(str(cause))):
            full = f"the machine's memory was full ({used[1]} of {used[2]} GB)"
            return f"Ray ended a process, for {full}: {CURE}, or end other programs"
        if type(cause).__name__ in _PROCESS_ENDED:
            words = f"{LOG_NAME} has its last words if it crashed; else, {why_killed(self._oom_kills)}"
            return f"a process of the trainer died ({type(cause).__name__}): {words}"
        return _with_cure(root_cause(exc))

    def core_exception(self, exc: BaseException) -> str:
        """What vLLM's core died of, if it died; ``exc`` is what ended the run."""
        if self._ray_folder is None:
            return ""
        # only what is sure to come is waited for
        died = type(innermost(exc)).__name__ == "VllmDiedError" or "Engine core" in str(exc)
        return core_exception(self._log, self._log_start, LAG if died else 0.0)

    def execute(self, job: TrainJob, link: EngineEnd) -> None:
        """Train until the end of the run or a Stop.

        Raises:
            ConfigError: before anything heavy starts.
            EngineError: the trainer failed; other exceptions carry their cause (see :func:`root_cause`).
        """
        from adapters.models import resolve_model
        from adapters.verl.config import as_plain, as_told, resolve_device, serving_mode, verl_config
        from adapters.verl.machine import check_machine

        self._run_dir.mkdir(parents=True, exist_ok=True)
        forget_deadline(self._run_dir)
        model = resolve_model(job.model)
        device = resolve_device(job)
        check_machine(job, device)
        config = verl_config(job, model, self._run_dir, device)
        serving = serving_mode(job, config)
        environment = run_environment(self._run_dir, job, model, device, serving)
        link.send(ResolvedConfig(config=as_told(config)))
        vllm = config.actor_rollout_ref.rollout.engine_kwargs.vllm
        parsers = (
            f"tool_call_parser {vllm.tool_call_parser or 'none'}, reasoning_parser {vllm.reasoning_parser or 'none'}"
        )
        chosen = f"on {device}, serving {serving}{' (auto)' if job.serving == 'auto' else ''}, {parsers}"
        print(f"engine: {model} {chosen}", flush=True)
        link.send(BootProgress(stage="starting Ray", detail=chosen))
        self._ray_folder = RayFolder(self._run_dir)
        if job.nnodes == 1:
            environment |= self._ray_folder.meeting_places()
        os.environ.update(environment)
        if device == "cpu":
            # who hides GPUs by it would hide the one from Ray that stands in for a CPU
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)

        import ray

        settings = as_plain(config.ray_kwargs).get("ray_init", {})
        arguments = init_arguments(job, device, self._ray_folder.path, environment, settings)
        if job.nnodes > 1 and not self._wait_for(link, lambda: missing_cluster(arguments["address"])):
            return
        # a fork knows nothing of an environment that an operator describes
        if device == "cpu" and job.nnodes == 1 and not any((settings.get("runtime_env") or {}).values()):
            command, self._preloaded = start_preloading(self._ray_folder.path)
            arguments["runtime_env"]["py_executable"] = shlex.join(command)
            # A fork registers when all is imported; Ray's own minute is short on a busy machine. By this alone Ray
            # notices that a worker died before it registered.
            os.environ.setdefault("RAY_worker_register_timeout_seconds", "180")
        start_ray(arguments, self._ray_folder.path)
        # Ray's own handler ends the process at once
        signal.signal(signal.SIGTERM, lambda *_: self._terminated.set())
        if job.nnodes > 1 and not self._wait_for(link, lambda: missing_nodes(ray.nodes(), job.nnodes, job.n_gpu)):
            return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from adapters.verl.replicas import end_trainer, outlives_trainer
        from adapters.verl.task_runner import TaskRunner

        code = code_imported(Path(folder)) if (folder := os.environ.get(CODE_VARIABLE)) else {}
        # the link ends on this node's loopback
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        nodes = NodeWatch(job.nnodes)
        while True:
            link.send(BootProgress(stage="loading verl"))
            runner = TaskRunner.options(scheduling_strategy=here).remote()
            address, token = os.environ[ADDRESS_VARIABLE], os.environ[TOKEN_VARIABLE]
            done = runner.run.remote(config, job, self._run_dir, serving, code, address, token)
            try:
                self._train(done, link, nodes)
                return
            except ray.exceptions.RayError as exc:
                if gone := nodes.failing():
                    raise EngineError(gone) from exc
                if not outlives_trainer(config) or is_final(exc):
                    raise
                if self.core_exception(exc):
                    # it failed because vLLM is dead
                    raise
                error = passed_deadline(self._run_dir) or self.cause(exc)
            _complain(f"the trainer failed: {error}", 1)
            # at once: the dead trainer's role must not count as silent
            link.send(TrainerDied(error=error))
            end_trainer(runner)
            if (again := self._wait_for_start(link)) is None:
                return
            forget_deadline(self._run_dir)
            config = verl_config(job.model_copy(update={"resume": again.resume}), model, self._run_dir, device)

    def _wait_for(self, link: EngineEnd, missing: Callable[[], str]) -> bool:
        """Wait until nothing is missing; ``False`` if the server said Stop meanwhile.

        Raises:
            EngineError: the engine was terminated, or the time of a boot has passed.
        """
        until, reported = time.monotonic() + BOOT, ""
        while what := missing():
            if what != reported:
                link.send(BootProgress(stage="waiting for nodes", detail=what))
                reported = what
            if isinstance(link.receive(timeout=0.5), Stop):
                return False
            self._check_terminated()
            if time.monotonic() > until:
                raise EngineError(f"waited {BOOT:.0f} s for nodes: {what}")
        return True

    def _train(self, done: Any, link: EngineEnd, nodes: NodeWatch) -> None:
        """Wait for the end of the trainer, or a Stop.

        Raises:
            ray.exceptions.RayError: it failed.
            EngineError: this process was terminated, or a node is gone.
        """
        import ray

        while True:
            ready, _ = ray.wait([done], timeout=0.5)
            if ready:
                ray.get(done)
                return
            if isinstance(link.receive(timeout=0), Stop):
                # the trainer has been told as well: let it close its loggers unless it is in the middle of a step
                ray.wait([done], timeout=STOP_GRACE)
                return
            self._check_terminated()
            nodes.check()

    def _wait_for_start(self, link: EngineEnd) -> StartTrainer | None:
        """The server's word to start another trainer; ``None`` if it says Stop."""
        # no deadline of its own: a server that dies is noticed by its heartbeats
        while True:
            message = link.receive(timeout=0.5)
            if isinstance(message, StartTrainer):
                return message
            if isinstance(message, Stop):
                return None
            self._check_terminated()

    def _check_terminated(self) -> None:
        if self._terminated.is_set():
            raise EngineError("the engine was terminated")

    def abandon(self) -> None:
        """The server is gone, so nobody waits for an orderly end: kill, remove, exit. Called in the link's thread."""
        _complain("the swarm server is gone", 1)
        kill_processes(grace=1.0)
        if self._ray_folder is not None:
            remove_leftovers(self._ray_folder, self._began)
        os._exit(1)

    def clean_up(self) -> None:
        """End the cluster and all processes of the run and remove what they leave; bounded in time."""
        timer = threading.Timer(EXIT_GRACE, os._exit, args=(1,))
        timer.daemon = True
        timer.start()
        if self._ray_folder is not None:
            import ray

            ray.shutdown()
        kill_processes()
        if self._ray_folder is not None:
            remove_leftovers(self._ray_folder, self._began)
        timer.cancel()


def run_environment(run_dir: Path, job: TrainJob, model: str, device: str, serving: ServingMode) -> dict[str, str]:
    """Variables for every process of the run; what the operator has set wins where it is a matter of taste."""
    from adapters.verl.cpu import cpu_environment

    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # prestarted workers would be one idle Python process per logical CPU
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_DEDUP_LOGS": "0",
        # Ray runs its workers at nice 15, where anything else on the machine starves trainer and vLLM
        "RAY_worker_niceness": "0",
        "TOKENIZERS_PARALLELISM": "true",
        "NCCL_DEBUG": "WARN",
        "VLLM_LOGGING_LEVEL": "WARN",
        # caches compiled for other weights have been seen to be used (vllm#31199)
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "VERL_LOGGING_LEVEL": "WARN",
        "VLLM_NO_USAGE_STATS": "1",
        "TRANSFER_QUEUE_ENABLE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if Path(model).is_dir():
        variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    forced = {RUN_VARIABLE: secrets.token_hex(4)}
    if job.nnodes == 1:
        # Ray's word for "this machine only": otherwise it puts everything, and vLLM with it, on the address that
        # other machines see, without authentication
        forced["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if device == "cpu":
        for name, value in cpu_environment(run_dir, serving).items():
            (forced if name in ("VERL_USE_EXTERNAL_MODULES", "PYTHONPATH") else variables)[name] = value
    # the supervisor's comes with everything that the run imports from, synced code first
    paths = [forced.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    forced["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    chosen = {name: os.environ.get(name, value) for name, value in variables.items()}
    return {**chosen, **forced}
