"""The run folder of one job under ``up`` and ``train``: who uses it, what it saved, its logs, and the file that they
leave there while they run, so that other commands find their servers.

Invariant: nothing in the folder changes before it is held, and one process holds it at a time; what an earlier start
wrote is kept. Only its owner reads that file, for it holds the token that the run's processes share, which dies with
the run; and it counts only while the process that wrote it lives, and not in a copy of the folder.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import psutil
import yaml
from pydantic import ValidationError

from swarm.credentials import replace_private
from swarm.errors import ConfigError
from swarm.files import replace_file
from swarm.types import Model

_LOCK = "up.lock"
#: Held by the swarm server that writes the journal.
_JOURNAL_LOCK = "journal.db.lock"
_OF_THE_SERVER = ("tokens.json", "code", "refused")
#: Logs of earlier starts that are kept.
_KEPT_LOGS = 3
RUN_FILE = "up.json"
#: Seconds by which a process's start, as the system tells it, may differ from one look to the next.
_SAME_START = 1.0


@contextmanager
def held(folder: Path) -> Generator[None]:
    """Hold ``folder``, which is made if needed, inside the block; a process that dies no longer holds it.

    Raises:
        ConfigError: another ``up`` holds the folder, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        reason = exc.strerror or exc
        raise ConfigError(f"the run folder {folder} cannot be written ({reason}); set swarm.run_dir") from exc
    try:
        _lock(descriptor, folder, "another `up` or `train`")
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # the disk is full: whoever is refused then learns no pid
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def check_free(folder: Path) -> None:
    """Raise :class:`ConfigError` if another ``up`` holds ``folder``; changes nothing."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        _lock(descriptor, folder, "another `up` or `train`")
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, whose: str) -> None:
    import fcntl  # not on Windows, where nobody runs servers, and commands look here for those that run

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        raise ConfigError(
            f"the run folder {folder} is in use by {whose} (pid {holder or 'unknown'}): stop it, or set swarm.run_dir"
        ) from None
    except OSError as exc:
        # as on some network file systems
        raise ConfigError(f"cannot lock the run folder {folder}: {exc.strerror or exc}; set swarm.run_dir") from exc


def set_aside(folder: Path) -> Path | None:
    """Rename ``folder`` to the first free ``NAME-1``, ``NAME-2``, ...; its new path, or ``None`` if there is no folder.
    Tokens, synced code and records of refused requests are the server's and not the run's: they stay.

    Raises:
        ConfigError: another ``up`` or a swarm server uses the folder, or it cannot be renamed.
    """
    if not folder.exists():
        return None
    with held(folder):
        with suppress(FileNotFoundError), (folder / _JOURNAL_LOCK).open() as file:
            # one may run without `up`
            _lock(file.fileno(), folder, "a swarm server")
        number = 1
        while (kept := folder.with_name(f"{folder.name}-{number}")).exists():
            number += 1
        try:
            folder.rename(kept)
            folder.mkdir()
            for name in _OF_THE_SERVER:
                if (kept / name).exists():
                    (kept / name).rename(folder / name)
        except OSError as exc:
            raise ConfigError(f"the run folder {folder} cannot be renamed to {kept.name} ({exc.strerror})") from exc
        return kept


def keep_earlier(log: Path) -> None:
    """Make room for a new ``log``: the earlier ones become ``NAME.1`` (the latest), ``NAME.2``, ...; an empty one, of a
    start that failed, takes no place."""
    if log.exists() and log.stat().st_size:
        RotatingFileHandler(log, backupCount=_KEPT_LOGS, delay=True).doRollover()


def write_section(file: Path, section: dict[str, Any]) -> None:
    """Write what a server reads from a file, unless it says that already; the file is whole at any time.

    Raises:
        OSError: it cannot be written; it is as it was.
    """
    content = yaml.safe_dump(section).encode()
    if not file.exists() or file.read_bytes() != content:
        replace_file(file, content)


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


def write_run(run: RunFile) -> None:
    """Put the file into each run folder.

    Raises:
        ConfigError: a folder cannot be written.
    """
    for server in run.servers:
        replace_private(server.run_dir / RUN_FILE, run)


def run_of_this_process(file: Path | None, servers: list[RunServer], gateway: str, token: str) -> RunFile:
    """What this process runs; see :class:`RunFile`."""
    own = psutil.Process()
    return RunFile(pid=own.pid, started=since_boot(own), file=file, servers=servers, gateway=gateway, token=token)


def living_run(run_dir: Path) -> RunFile | None:
    """The run in this folder; ``None`` if none runs, or if its file is another folder's, or not
    this user's alone."""
    try:
        with (run_dir / RUN_FILE).open("rb") as reader:
            about = os.fstat(reader.fileno())
            text = reader.read()
        # nobody else may say where commands go
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            return None
        run = RunFile.model_validate_json(text)
        started = since_boot(psutil.Process(run.pid))
        # a copy of the folder has the original's
        if run_dir.resolve() not in {server.run_dir.resolve() for server in run.servers}:
            return None
    except (OSError, ValidationError, psutil.Error):
        return None
    return run if abs(started - run.started) < _SAME_START else None


def since_boot(process: psutil.Process) -> float:
    """When it started, see :class:`RunFile`."""
    # both follow the clock; the boot first, which psutil may remember for the other
    boot = psutil.boot_time()
    return process.create_time() - boot
