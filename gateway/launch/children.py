"""Child processes with a log file each; a stopped child leaves no descendant behind, and stopping takes bounded time.

A child runs in its own session, so that Ctrl-C reaches the parent alone, which decides the order of stopping. The
parent holds the child's stdin open: when the parent is killed, the pipe closes, and the child ends. All that a child
starts inherits a variable with the run folder, by which it is found whoever its parent is by then.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from gateway.launch.run_folder import keep_earlier

#: In the environment of everything that an ``up`` starts: its run folder, of several the first.
FOLDER_VARIABLE = "SWARM_UP_FOLDER"
_TAIL_BYTES = 65_536
_POLL = 0.05
_LOOK = 0.5


class Child:
    """One running child process; ``name`` is for messages, ``log`` is the file of its output; logs of earlier starts
    stay beside it."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        self._read = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        keep_earlier(log)
        # an earlier one has another name by now; to append is to follow whoever cuts the log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: a signal of that number ended it."""
        return self._process.poll()

    def last_lines(self, count: int = 20) -> list[str]:
        """The last lines of its log, without empty ones; none where somebody has taken the log away."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return [line.rstrip() for line in lines if line.strip()][-count:]

    def new_lines(self) -> list[str]:
        """The whole lines of its log since the last call; none where somebody has taken the log away."""
        try:
            with self.log.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._read:
                    # somebody has cut it
                    self._read = 0
                file.seek(self._read)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._read += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()

    def find(self, pattern: str) -> re.Match[str] | None:
        """The first match of ``pattern`` in its log."""
        return re.search(pattern, self.log.read_text(errors="replace"))

    def stop(self, grace: float, hurry: threading.Event | None = None) -> bool:
        """SIGTERM, then after ``grace`` seconds, or once ``hurry`` is set, SIGKILL to it and all its descendants.

        Returns:
            Whether it ended by itself within the grace.
        """
        family = descendants(self.pid)
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(OSError):  # also BrokenPipeError: it closed its end
            if self._process.stdin:
                self._process.stdin.close()
        deadline = time.monotonic() + grace
        hurry = hurry or threading.Event()
        while self.exit_code is None and time.monotonic() < deadline and not hurry.wait(_POLL):
            family |= descendants(self.pid)
        graceful = self.exit_code is not None
        if not graceful:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._process.wait()
        kill_all(family)
        return graceful


def descendants(pid: int) -> set[psutil.Process]:
    """All living descendants of ``pid``; once it is dead, nothing leads to them."""
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def kill_all(processes: set[psutil.Process]) -> None:
    """Send SIGKILL to those that still live; psutil compares start times, so it spares a reused pid."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(processes), timeout=5)


def left_behind(folder: Path) -> list[psutil.Process]:
    """Living processes of an ``up`` in ``folder``, which runs no more."""
    strays: list[psutil.Process] = []
    for process in psutil.process_iter():
        # it may be gone, or somebody else's
        with contextlib.suppress(psutil.Error, OSError):
            is_of_folder = process.environ().get(FOLDER_VARIABLE) == str(folder)
            if is_of_folder and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                strays.append(process)
    return strays


def end_left_behind(folder: Path, grace: float, hurry: threading.Event) -> None:
    """Wait until the processes of an earlier ``up`` in ``folder`` have ended, which they do as soon as they notice that
    it is gone; after ``grace`` seconds, or once ``hurry`` is set, kill them."""
    deadline = time.monotonic() + grace
    while (left := left_behind(folder)) and time.monotonic() < deadline and not hurry.wait(_LOOK):
        pass
    kill_all(set(left))
