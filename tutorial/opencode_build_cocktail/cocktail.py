"""Two agents train one model, each in a process of its own; one is killed on the way and comes back.

python cocktail.py --quick
python cocktail.py --steps 4 4 8
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from worker import SWARM_URL

from swarm.client import SwarmClient
from swarm.job import read_job
from swarm.status import ServerStatus

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.rolling import exit_code, started  # noqa: E402

SHARES = {"sums": 0.4, "translation": 0.6}
KILLED = "sums"
STEP_SECONDS = 400.0


class Progress:
    """The training steps, and the episodes of each client, as the swarm server tells them after every step."""

    def __init__(self) -> None:
        self._step = 0
        self._ended: dict[str, int] = {}
        self._changed = threading.Condition()

    def observe(self, status: ServerStatus) -> None:
        with self._changed:
            if status.engine.global_step > self._step:
                self._step = status.engine.global_step
                print(f"  step {self._step}", flush=True)
            self._ended = {client.client_uuid: client.ended for client in status.clients}
            self._changed.notify_all()

    def steps(self, count: int) -> None:
        """Wait for ``count`` more steps."""
        with self._changed:
            goal = self._step + count
            self._wait(lambda: self._step >= goal, count, f"step {goal} is not done")

    def episodes_of(self, client: str) -> None:
        """Wait until ``client`` has ended more episodes."""
        with self._changed:
            before = self._ended.get(client, 0)
            self._wait(lambda: self._ended.get(client, 0) > before, 2, f"{client} has ended no episode")

    def _wait(self, condition: Callable[[], bool], steps: int, failure: str) -> None:
        if not self._changed.wait_for(condition, STEP_SECONDS * steps):
            raise SystemExit(f"cocktail: {failure} in time")


def start(agent: str, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / "worker.py"), agent, "--share", str(SHARES[agent])]
    return subprocess.Popen([*command, "--swarm-url", arguments.swarm_url])


def cocktail(client: SwarmClient, arguments: argparse.Namespace) -> None:
    """Train with both, then with one of them, then with both again."""
    together, alone, again = arguments.steps
    progress = Progress()
    workers: dict[str, subprocess.Popen[bytes]] = {}
    with client.watching_status(progress.observe):
        try:
            workers |= {agent: start(agent, arguments) for agent in SHARES}
            # before, one of them may fill a batch alone
            for agent in SHARES:
                progress.episodes_of(agent)
            progress.steps(together)
            workers[KILLED].kill()
            workers[KILLED].wait()
            print(f"killed {KILLED}", flush=True)
            progress.steps(alone)
            workers[KILLED] = start(KILLED, arguments)
            progress.episodes_of(KILLED)
            print(f"{KILLED} is back", flush=True)
            progress.steps(again)
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one model with two agents at 0.4 and 0.6 of each batch.")
    parser.add_argument("--swarm-url", default=SWARM_URL)
    parser.add_argument("--model", default="", help="another model than job.yaml's")
    parser.add_argument(
        "--steps", type=int, nargs=3, default=(4, 4, 8), help="training steps with both, with one, and with both again"
    )
    parser.add_argument("--quick", action="store_true", help="1, 3 and 2 steps")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps = (1, 3, 2)
    if min(arguments.steps) < 1:
        parser.error("--steps must be at least 1")
    job = read_job(HERE / "job.yaml", **({"model": arguments.model} if arguments.model else {}))
    with started(arguments.swarm_url, job) as client:
        cocktail(client, arguments)
    print(f"{sum(arguments.steps)} steps")


if __name__ == "__main__":
    sys.exit(exit_code(main))
