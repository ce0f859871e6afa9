"""A gateway process before a swarm server process with the suite's engine, and what they have counted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from swarm.client import SwarmClient
from swarm.job import TrainJob
from tests.standins.models import GIVES_UP

ROOT = Path(__file__).parent.parent.parent
MODEL, GROUP = "tiny", 2
#: For everything that is waited for; a loaded machine starts a process in some ten seconds.
SECONDS = 120.0
#: Giving up is worth nothing.
HOOK = f"""
def on_compute_relative_reward(task, candidates, context):
    return [0.0 if candidate.text == {GIVES_UP!r} else 1.0 for candidate in candidates]
"""


@dataclass(frozen=True)
class Stack:
    """What runs; ``url`` is the gateway's, without ``/v1``."""

    url: str
    swarm: SwarmClient

    @property
    def base_url(self) -> str:
        """As OpenAI's SDKs want it."""
        return f"{self.url}/v1"

    @contextlib.contextmanager
    def trains(self, groups: int, *, rewards: tuple[float, ...] = (0.0, 1.0)) -> Generator[None]:
        """Asserts that exactly ``groups`` more groups are in the pool after the block, each with ``rewards`` (in any
        order), and that nothing is under way any more."""
        before = self.rewards()
        yield
        self.settled()
        new = {task: given for task, given in self.rewards().items() if task not in before}
        assert [sorted(given) for given in new.values()] == [sorted(rewards)] * groups

    @contextlib.contextmanager
    def passes(self, rule: str, requests: int) -> Generator[None]:
        """Asserts that so many requests pass through by ``rule`` within the block."""
        before = self._status()["passed_through"].get(rule, 0)
        yield
        assert self._status()["passed_through"].get(rule, 0) - before == requests

    def rewards(self) -> Mapping[str, list[float]]:
        """Those of every task in the pool."""
        return self.swarm.get_rollout_stat().completed_tasks_rewards

    def settled(self) -> None:
        """Wait until the gateway has nothing left to do for any request."""
        deadline = time.monotonic() + SECONDS
        while (status := self._status())["in_flight"] or status["background"]:
            assert time.monotonic() < deadline, status
            time.sleep(0.05)

    def _status(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/status", timeout=SECONDS, trust_env=False).json()


@contextlib.contextmanager
def stack(
    folder: Path,
    hook: str = HOOK,
    session_hook: str = "",
    gateway: str = "gateway.cli",
    batch_size: int = 500,
    **settings: Any,
) -> Generator[Stack]:
    """Both processes with their files in ``folder``; ``hook`` judges answers and ``session_hook`` sessions, and
    ``settings`` are those of the ``gateway``."""
    with (
        _process("tests.standins.server", "clients", str(folder / "run"), "0") as swarm_url,
        SwarmClient(swarm_url) as swarm,
    ):
        # room for all that the suite does: a step would empty the pool that it looks into
        job = TrainJob(model=MODEL, num_repeat=GROUP, batch_size=batch_size, max_response_length=2000)
        swarm.auto_sync_train_config_and_start_engine(job)
        hooks = folder / "hooks"
        hooks.mkdir()
        (hooks / "on_compute_relative_reward.py").write_text(hook)
        if session_hook:
            (hooks / "on_session_end.py").write_text(session_hook)
        config = folder / "gateway.yaml"
        config.write_text(yaml.safe_dump({"swarm_url": swarm_url, "hooks": str(hooks), "port": 0, **settings}))
        with _process(gateway, "serve", "--config", str(config)) as url:
            yield Stack(url, swarm)


@contextlib.contextmanager
def _process(module: str, *arguments: str) -> Generator[str]:
    """A server of ours, which says where it listens."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: deque[str] = deque(maxlen=50)
    url: list[str] = []
    listening = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip())
            if not url and "listening on http" in line:
                url.append(line.split("listening on ")[1].strip())
                listening.set()
        listening.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        listening.wait(SECONDS)
        assert url, "\n".join(said)
        yield url[0]
    finally:
        process.terminate()
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(SECONDS)
        assert process.stdout is not None
        process.stdout.close()
