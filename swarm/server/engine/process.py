"""The engine's operating-system processes: start, last words, and an end that leaves nothing behind.

Invariant: after :meth:`EngineProcess.end` no process of the run is alive; its shared memory and Ray sessions are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from swarm.link.leftovers import held_segments, remove_ray_folder, remove_segments
from swarm.machine import oom_kills, why_killed

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SWARM_LINK_TOKEN"
LOG_NAME = "engine.log"
LAST_LINES = 30
_KILL_ROUNDS = 10


class EngineProcess:
    """One engine run: the driver process, its descendants and whoever carries the run's token.

    Ray's workers leave the process group, and its daemons outlive their parents, so kinship alone does not find them;
    the token in their environment does.
    """

    def __init__(self, process: asyncio.subprocess.Process, token: str, run_dir: Path, log_start: int) -> None:
        self._process = process
        self._token = token
        self._run_dir = run_dir
        self._log_start = log_start
        self._started = time.time()
        self._oom_kills = oom_kills()

    @classmethod
    async def start(cls, command: Sequence[str], environ: Mapping[str, str], run_dir: Path) -> Self:
        """Start ``command`` in a session of its own; its output is appended to ``run_dir/engine.log``.

        Raises:
            OSError: the command cannot be started or the log cannot be written.
        """
        with (run_dir / LOG_NAME).open("ab") as log:
            log_start = log.tell()
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,
            )
            return cls(process, environ[TOKEN_VARIABLE], run_dir, log_start)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> str:
        """Wait for the driver to exit; how it did, for people."""
        code = await self._process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):
                killed = f"the engine process was killed by {signal.Signals(-code).name}"
                return f"{killed}: {why_killed(self._oom_kills)}" if -code == signal.SIGKILL else killed
        return f"the engine process exited with code {code}"

    def last_lines(self, count: int = LAST_LINES) -> list[str]:
        """The last lines that this run wrote."""
        try:
            with (self._run_dir / LOG_NAME).open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                # it may have been cut meanwhile
                start = self._log_start if self._log_start <= size else 0
                log.seek(max(start, size - 64 * 1024))
                return log.read().decode(errors="replace").splitlines()[-count:]
        except OSError as exc:
            return [f"(cannot read the engine's log: {exc})"]

    async def end(self, grace: float) -> None:
        """Wait ``grace`` seconds for the driver to exit, then kill and clean up all that is left of the run."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._process.wait()
        await asyncio.to_thread(self._kill_and_clean)
        await self._process.wait()

    def _kill_and_clean(self) -> None:
        segments: set[int] = set()
        for _ in range(_KILL_ROUNDS):
            victims = self._members()
            if not victims:
                break
            segments |= held_segments(victims)
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
            # our own child is reaped by the event loop; waiting for it here would take its exit status away
            psutil.wait_procs([victim for victim in victims if victim.pid != self.pid], timeout=5.0)
        else:
            logger.error("processes of the engine survive SIGKILL: %s", [process.pid for process in self._members()])
        remove_segments(self._started, held=segments)
        remove_ray_folder(self._run_dir / "ray")

    def _members(self) -> list[psutil.Process]:
        """All living processes of the run."""
        members: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if os.getpgid(process.pid) == self.pid or process.environ().get(TOKEN_VARIABLE) == self._token:
                    members[process.pid] = process
                    for child in process.children(recursive=True):
                        if child.status() != psutil.STATUS_ZOMBIE:
                            members[child.pid] = child
        return list(members.values())
