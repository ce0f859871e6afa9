"""A version that a run folder keeps is written as a model folder and served by a vLLM of its own, for as long as
somebody asks it.

Invariant: whatever ends that, no process is left and no folder; what a SIGKILL leaves goes with the next time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from gateway.launch import plan
from gateway.launch.children import Child
from gateway.launch.plan import IncumbentPlan, export_command
from gateway.launch.servers import ended, listens
from swarm.errors import ConfigError
from swarm.http.serve import free_port
from swarm.importer import python_path
from swarm.job import TrainJob

_GRACE = 10.0
_POLL = 0.2
#: Seconds until a version must be written, and until vLLM must listen. Each that dies before is noticed at once.
_LONGEST = 1800.0
#: Begins the names of folders in the run folder; then comes the process that they are of.
_OURS = ".eval-"


@contextmanager
def written(run_dir: Path, job: TrainJob, step: int) -> Generator[str]:
    """The model of the version of ``step``, in a folder of its own; 0: the model that the run began with.

    Args:
        run_dir: keeps the version.
        job: of the run.
        step: of the version.

    Raises:
        ConfigError: it cannot be written; with the last line of the log, and where that is.
    """
    if not step:
        yield job.model
        return
    with _folder(run_dir) as folder:
        arguments = export_command(run_dir, step, folder / "model", merged=job.lora is not None)
        with _child(f"export of {label_of(step)}", arguments, run_dir) as export:
            _wait(export)
        yield str(folder / "model")


@contextmanager
def served(model: str, run_dir: Path, job: TrainJob, step: int, vllm_arguments: Sequence[str] = ()) -> Generator[str]:
    """The base URL of ``model``, which is the version of ``step``; arguments and errors are those of :func:`written`.

    Args:
        vllm_arguments: more of them for vLLM.
    """
    lengths = job.max_model_len, job.max_response_length
    planned = IncumbentPlan(model, label_of(step), free_port(), *lengths, tuple(vllm_arguments))
    with (
        _folder(run_dir) as folder,
        _child(f"vLLM of {label_of(step)}", planned.command(folder), run_dir) as vllm,
    ):
        _wait(vllm, planned.port)
        yield f"http://127.0.0.1:{planned.port}/v1"


def label_of(step: int) -> str:
    """What reports call the version of ``step``."""
    return f"step {step}" if step else "the model before"


@contextmanager
def _folder(run_dir: Path) -> Generator[Path]:
    for left in run_dir.glob(f"{_OURS}*"):
        pid = left.name.removeprefix(_OURS).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    prefix = f"{_OURS}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=run_dir, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _child(name: str, arguments: Sequence[str], run_dir: Path) -> Generator[Child]:
    """Our command line with ``arguments``, which ends with the block."""
    log = run_dir / "logs" / f"eval-{name.replace(' ', '-')}.log"
    child = Child(name, [*plan.COMMAND, *arguments], log, {"PYTHONPATH": python_path()})
    try:
        yield child
    finally:
        child.stop(_GRACE)


def _wait(child: Child, port: int | None = None) -> None:
    """Until ``child`` listens on ``port``, or without one until it has ended well."""
    deadline = time.monotonic() + _LONGEST
    while time.monotonic() < deadline:
        if (code := child.exit_code) is not None:
            if code or port is not None:
                raise ConfigError(f"{ended(child).with_last_line} (see {child.log})")
            return
        if port is not None and listens(("127.0.0.1", port)):
            return
        time.sleep(_POLL)
    last = ": ".join((f"the {child.name} took longer than {_LONGEST:.0f} s", *child.last_lines(1)))
    raise ConfigError(f"{last} (see {child.log})")
