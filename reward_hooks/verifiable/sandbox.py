"""Run untrusted Python in a process with limits and without network.

Invariant: no program runs without all of its limits; if the system does not grant them, that is an error.

Limited per run: processor seconds, seconds, memory and threads per process, the size of each file, open files. The
environment is empty, and the working directory is temporary. The run has its own user, network, process and IPC
namespaces: there is no network, not even this machine's addresses, no process outside is visible, and all processes end
with the run, also those that left the process group. A gateway that runs as root switches to user 65534 first.

Not limited: reading files that every user may read, writing where every user may write, and the number of files. Run
the gateway in a container if that matters.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import Field

from swarm.errors import ConfigError
from swarm.types import Model

_LAUNCHER = str(Path(__file__).with_name("launcher.py"))
_NOBODY = 65534
#: For a gateway that runs as root, whose own interpreter user 65534 may not be able to reach.
_SYSTEM_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
#: The two processes of the launcher that count in the program's process namespace.
_LAUNCHER_PROCESSES = 2
#: Seconds for the kernel to end all processes of a late program.
_END = 10.0


class Limits(Model):
    """Limits of one run. ``processes`` includes threads; ``memory_bytes`` is address space, per process."""

    seconds: float = Field(default=10.0, gt=0, le=600)
    cpu_seconds: int = Field(default=5, ge=1)
    memory_bytes: int = Field(default=1 << 30, ge=1 << 26)
    file_bytes: int = Field(default=1 << 20, ge=1 << 10)
    open_files: int = Field(default=64, ge=8)
    processes: int = Field(default=1, ge=1)


class Finished(Model):
    """How a run ended: ``status`` is the exit status, 128 + signal, or ``None`` if it was killed at its deadline.

    ``output`` and ``errors`` are the text of standard output and error, cut at ``file_bytes``.
    """

    status: int | None
    output: str
    errors: str
    seconds: float


class Sandbox:
    """Runs programs; safe for concurrent use from several threads.

    Args:
        limits: of each run.
        python: the interpreter that runs programs. Default: the gateway's own, or the system's if the gateway runs as
            root in a place that only root may enter.
        allow_network: also run if the system grants no namespaces. Programs then reach the network, see the user's
            other processes, and outlive the run if they leave their process group: only for trusted programs.

    Raises:
        ConfigError: the system grants no isolation, or is not Linux (``no_sandbox``).
    """

    def __init__(self, limits: Limits | None = None, *, python: str | None = None, allow_network: bool = False) -> None:
        self._limits = limits or Limits()
        if not sys.platform.startswith("linux"):
            raise ConfigError("the sandbox for code needs Linux", code="no_sandbox")
        own = [sys.executable, *(_SYSTEM_PYTHONS if os.geteuid() == 0 else ())]
        finished = None
        for self._isolate in (True, False) if allow_network else (True,):
            for self._python in [python] if python else own:
                finished = self.run("import sys; sys.stdout.write('ready')")
                if finished.output == "ready":
                    return
        if finished is not None:
            raise ConfigError(
                f"cannot run code in a sandbox: {finished.errors.strip()[-300:] or f'status {finished.status}'}. "
                "Unprivileged user namespaces are needed (sysctl user.max_user_namespaces, and "
                "kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; seccomp profile of a container). Set "
                "allow_network to run it with the network and without process isolation",
                code="no_sandbox",
            )

    def run(self, program: str, given: str = "", seconds: float = math.inf) -> Finished:
        """Run Python source text with ``given`` as standard input.

        Args:
            program: source of a main module; it can import the standard library and installed packages.
            given: text of standard input.
            seconds: a deadline, if shorter than the limit.

        Raises:
            OSError: a process or temporary folder cannot be made.
        """
        seconds = min(seconds, self._limits.seconds)
        # errors of the removal are raised: leftovers would add up
        with tempfile.TemporaryDirectory(prefix="sandbox-") as outer:
            folder = Path(outer)
            work = folder / "work"
            work.mkdir()
            source = folder / "program.py"
            source.write_text(program, encoding="utf-8", errors="replace")
            (folder / "input").write_text(given, encoding="utf-8", errors="replace")
            user = _NOBODY if os.geteuid() == 0 else None
            if user is not None:
                os.chown(work, user, user)
                folder.chmod(0o711)
                source.chmod(0o644)
            started = time.monotonic()
            with (
                (folder / "input").open("rb") as stdin,
                (folder / "output").open("wb") as stdout,
                (folder / "errors").open("wb") as stderr,
                subprocess.Popen(
                    [sys.executable, "-I", "-S", _LAUNCHER, json.dumps(self._spec(source, user))],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=work,
                    env={},
                    start_new_session=True,
                ) as process,
            ):
                status = _wait(process, seconds, self._isolate)
            return Finished(
                status=status,
                output=_text(folder / "output", self._limits.file_bytes),
                errors=_text(folder / "errors", self._limits.file_bytes),
                seconds=time.monotonic() - started,
            )

    def _spec(self, source: Path, user: int | None) -> dict[str, Any]:
        limits = self._limits
        return {
            # isolated: neither the environment nor the working directory adds modules
            "argv": [self._python, "-I", "-B", "-X", "utf8", str(source)],
            "isolate": self._isolate,
            "user": user,
            "limits": {
                "CPU": limits.cpu_seconds,
                "AS": limits.memory_bytes,
                "FSIZE": limits.file_bytes,
                "NOFILE": limits.open_files,
                "CORE": 0,
                # last: without a namespace it counts all processes of the user
                "NPROC": limits.processes + (_LAUNCHER_PROCESSES if self._isolate else 0),
            },
        }


def _wait(process: subprocess.Popen[bytes], seconds: float, isolate: bool) -> int | None:
    """The exit status, or ``None`` of a late program; if it is isolated, its processes have ended in both cases."""
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        if isolate:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END)
        return None
    finally:
        # without namespaces, kills what the program left running in its group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _text(path: Path, most: int) -> str:
    with path.open("rb") as file:
        return file.read(most).decode("utf-8", "replace")
