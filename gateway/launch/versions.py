"""A version that a run folder keeps is written as a model folder and served by a vLLM of its own, for as long as
somebody asks it.

Invariant: whatever ends that, no process and no folder is left.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gateway.launch.children import Child
from gateway.launch.plan import IncumbentPlan, export_command
from gateway.launch.servers import ended, listens
from swarm.errors import ConfigError
from swarm.http.serve import free_port
from swarm.importer import python_path
from swarm.job import TrainJob

_GRACE = 10.0
_POLL = 0.2
#: Seconds until a version must be written, and until vLLM must listen.
_LONGEST_EXPORT, _LONGEST_BOOT = 1800.0, 600.0


@contextmanager
def served(
    run_dir: Path, job: TrainJob, step: int, command: Sequence[str], vllm_arguments: Sequence[str] = ()
) -> Generator[str]:
    """The base URL of the version of ``step``; 0: the model that the run began with.

    Args:
        run_dir: keeps the version.
        job: of the run.
        step: of the version.
        command: starts our command line.
        vllm_arguments: more of them for vLLM.

    Raises:
        ConfigError: the version cannot be written or served; with the last line of the log.
    """
    with tempfile.TemporaryDirectory(prefix=".eval-", dir=run_dir) as folder:
        model = job.model
        if step:
            model = str(Path(folder, "model"))
            arguments = export_command(run_dir, step, Path(model), merged=job.lora is not None)
            with _child("export", [*command, *arguments], Path(folder)) as export:
                _wait(export, _LONGEST_EXPORT)
        lengths = job.max_prompt_length, job.max_response_length
        plan = IncumbentPlan(model, label_of(step), free_port(), *lengths, tuple(vllm_arguments))
        with _child("vLLM", [*command, *plan.command(Path(folder))], Path(folder)) as vllm:
            _wait(vllm, _LONGEST_BOOT, plan.port)
            yield f"http://127.0.0.1:{plan.port}/v1"


def label_of(step: int) -> str:
    """What reports call the version of ``step``."""
    return f"step {step}" if step else "the model before"


@contextmanager
def _child(name: str, command: Sequence[str], folder: Path) -> Generator[Child]:
    child = Child(name, command, folder / f"{name}.log", {"PYTHONPATH": python_path()})
    try:
        yield child
    finally:
        child.stop(_GRACE)


def _wait(child: Child, seconds: float, port: int | None = None) -> None:
    """Until ``child`` listens on ``port``, or without one until it has ended well."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (code := child.exit_code) is not None:
            if code or port is not None:
                raise ConfigError(ended(child).with_last_line)
            return
        if port is not None and listens(("127.0.0.1", port)):
            return
        time.sleep(_POLL)
    raise ConfigError(": ".join((f"the {child.name} took longer than {seconds:.0f} s", *child.last_lines(1))))
