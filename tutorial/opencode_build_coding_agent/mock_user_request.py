"""Users who let a coding agent repair the projects of ``repairs.jsonl``; each session is credited with its tests.

python mock_user_request.py --quick --agent claude
python mock_user_request.py --steps 20 --agent codex --report runs/report
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self
from urllib.parse import quote

from agents import AGENTS, Start, session_of, start

from gateway.replay.senders import Outcome
from swarm.http.client import ConnectionBrokenError, HttpClient
from swarm.types import Task

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.users import Address, main  # noqa: E402

JUDGE_SECONDS, END_SECONDS = 30.0, 30.0


def passes(module: Path, tests: str) -> bool:
    """Whether a repaired module passes its tests: both in a new folder, so that nothing else of the agent's counts."""
    with TemporaryDirectory() as folder:
        try:
            Path(folder, module.name).write_bytes(module.read_bytes())
            Path(folder, f"test_{module.name}").write_text(tests)
            command = [sys.executable, "-m", "unittest"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=JUDGE_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return False
    # a module that leaves at once exits with 0, too
    return done.returncode == 0 and done.stderr.rstrip().endswith("OK")


def prepared(folder: Path, task: Task) -> tuple[Path, Path, Path]:
    """Write the project of ``task`` into a new folder; returns its module, the agent's home, and the file for what the
    agent prints."""
    project, home = folder / "project", folder / "home"
    project.mkdir()
    home.mkdir()
    module = project / f"{task.task_id}.py"
    module.write_text(task.metadata["module"])
    (project / f"test_{module.name}").write_text(task.metadata["tests"])
    return module, home, folder / "printed"


def text_of(printed: Path) -> str:
    return printed.read_text(errors="replace")


class Repairers:
    """Has one project after another repaired, each by a run of the agent in folders that are then thrown away."""

    def __init__(self, to: Address) -> None:
        self._to = to
        self._agent: str = to.options.agent
        self._seconds: float = to.options.agent_seconds
        self._repaired: list[bool] = []
        self._http = HttpClient()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        done, half = self._repaired, len(self._repaired) // 2
        print(
            f"{self._agent} repaired {sum(done)} of {len(done)} projects: {sum(done[:half])} of the first {half}, "
            f"{sum(done[half:])} of the last {len(done) - half}"
        )

    async def send(self, task: Task) -> Outcome:
        began = time.monotonic()
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            module, home, printed = prepared(Path(folder), task)
            agent = start(self._agent, self._to.base_url, home, task.main_query)
            failure = await self._work(agent, module.parent, printed)
            repaired = await asyncio.to_thread(passes, module, task.metadata["tests"])
            lines = text_of(printed).strip()
        session = session_of(lines)
        if session:
            self._repaired.append(repaired)
            ended = await self._end(session, repaired, task)
            failure = failure or ended
        failure = failure or ("" if session else "it names no session")
        return Outcome(time.monotonic() - began, failure, lines.rpartition("\n")[2][:300] if failure else "")

    async def _work(self, agent: Start, project: Path, printed: Path) -> str:
        """Let the agent work; returns what went wrong."""
        with printed.open("wb") as out:
            try:
                process = await asyncio.create_subprocess_exec(
                    *agent.command,
                    cwd=project,
                    env=agent.env,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=out,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as exc:
                return f"{agent.command[0]} not started: {exc.strerror}"
        try:
            async with asyncio.timeout(self._seconds):
                await process.communicate(agent.typed.encode())
        except TimeoutError:
            return "timeout"
        finally:
            # also what it has left running
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return f"exit code {process.returncode}" if process.returncode else ""

    async def _end(self, session: str, repaired: bool, task: Task) -> str:
        """Credit the session with its outcome; returns what went wrong."""
        said = {"score": 1.0 if repaired else -1.0, "comment": "its tests", "task": task.task_id}
        url = f"{self._to.base_url}/sessions/{quote(session, safe='')}/end"
        headers = {"content-type": "application/json"}
        try:
            answer = await self._http.post(url, json.dumps(said).encode(), headers, END_SECONDS)
        except (ConnectionBrokenError, TimeoutError):
            return "session not ended"
        return "" if answer.status == 200 else f"session not ended: HTTP {answer.status}"


if __name__ == "__main__":
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--agent", choices=[*AGENTS], default="claude", help="a command that is on the PATH")
    options.add_argument("--agent-seconds", type=float, default=600.0, help="for one project")
    sys.exit(main(Repairers, HERE / "repairs.jsonl", "a coding agent", options))
