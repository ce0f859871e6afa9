"""What ``up`` and ``train`` leave in their run folders while they run, so that other commands find their servers.

Invariant: only its owner reads the file, for it holds the token that the run's processes share, which dies with the
run; and it counts only while the process that wrote it lives.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import ValidationError

from swarm.credentials import replace_private
from swarm.types import Model

NAME = "up.json"
#: Seconds by which a process's start, as the system tells it, may differ from one look to the next.
_SAME_START = 1.0


class RunServer(Model):
    """A swarm server; ``job`` is empty where there is one job."""

    job: str
    url: str
    run_dir: Path


class RunFile(Model):
    """One living ``up`` or ``train``.

    Attributes:
        pid, started: of its process; seconds after the boot of the machine, whose clock may be set meanwhile.
        file: the user's, as an absolute path.
        servers: its swarm servers.
        gateway: its address; empty where there is none.
        token: opens the servers.
    """

    pid: int
    started: float
    file: Path | None
    servers: list[RunServer]
    gateway: str = ""
    token: str


def write(run: RunFile) -> None:
    """Put the file into each run folder.

    Raises:
        ConfigError: a folder cannot be written.
    """
    for server in run.servers:
        replace_private(server.run_dir / NAME, run)


def remove(run_dirs: Iterable[Path]) -> None:
    """Take the files away."""
    for run_dir in run_dirs:
        (run_dir / NAME).unlink(missing_ok=True)


def of_this_process(file: Path | None, servers: list[RunServer], gateway: str, token: str) -> RunFile:
    """What this process runs; see :class:`RunFile`."""
    own = psutil.Process()
    return RunFile(pid=own.pid, started=since_boot(own), file=file, servers=servers, gateway=gateway, token=token)


def living(run_dir: Path) -> RunFile | None:
    """The run in this folder; ``None`` if none runs, or if its file is not this user's alone."""
    try:
        with (run_dir / NAME).open("rb") as reader:
            about = os.fstat(reader.fileno())
            text = reader.read()
        # nobody else may say where commands go
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            return None
        run = RunFile.model_validate_json(text)
        started = since_boot(psutil.Process(run.pid))
    except (OSError, ValidationError, psutil.Error):
        return None
    return run if abs(started - run.started) < _SAME_START else None


def since_boot(process: psutil.Process) -> float:
    """When it started, see :class:`RunFile`."""
    # both follow the clock; the boot first, which psutil may remember for the other
    boot = psutil.boot_time()
    return process.create_time() - boot
