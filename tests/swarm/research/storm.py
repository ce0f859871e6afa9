"""A whole study with real processes but for the engine, killed again and again, and then compared with a calm one.

``python -m tests.swarm.research.storm --kills 20`` runs 12 experiments and their confirmation on two swarm servers.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from swarm.importer import python_path
from swarm.research.ledger import State, read
from tests.standins.engine import FOLDER_VARIABLE
from tests.swarm.research.making import LRS, declared, folder_of, told
from tests.swarm.research.test_decisions import verdicts

CLI = [sys.executable, "-P", "-m", "gateway.cli", "research"]
SECONDS = 600.0
ASK = """
import json
import urllib.request

from swarm.types import WorkflowOutput

def asked(task, base_url, api_key):
    body = {"model": "m", "messages": [{"role": "user", "content": task.main_query}]}
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
AGENT = """
def solve(task, base_url, api_key, weight=1.0):
    return WorkflowOutput(reward=weight * (asked(task, base_url, api_key) == "good"))
"""
EVALUATE = """
def score(task, base_url, api_key):
    return WorkflowOutput(reward=float(asked(task, base_url, api_key)) + 0.001 * int(task.main_query[-1]))
"""


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path(), FOLDER_VARIABLE: str(folder)}


@contextmanager
def server(folder: Path, port: int = 0, end: signal.Signals = signal.SIGINT) -> Generator[str]:
    """The address of a swarm server, which gets the signal ``end`` after the block."""
    command = [sys.executable, "-P", "-m", "tests.swarm.research.learner", str(folder / "run"), str(port)]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(folder), start_new_session=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "listening on" in line, (folder / "log").read_text()
        yield line.split()[-1]
    finally:
        process.send_signal(end)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def study_at(folder: Path, urls: list[str], **changes: Any) -> Path:
    made = folder_of(folder, servers=urls, **changes)
    (made / "agent.py").write_text(ASK + AGENT)
    (made / "evaluate.py").write_text(ASK + EVALUATE)
    return made


def ran(folder: Path, kills: int, draw: random.Random, most: int, seconds: float = SECONDS) -> int:
    """Run the study to its end, with so many kills on the way, each up to ``most`` events and a second after the one
    before; how many there were."""
    killed = 0
    deadline = time.monotonic() + seconds
    log = folder.with_suffix(".log")
    while time.monotonic() < deadline:
        verb = "resume" if (folder / "ledger.jsonl").exists() and read(folder).study else "run"
        with log.open("ab") as output:
            process = subprocess.Popen([*CLI, verb, str(folder)], stdout=output, stderr=output, env=environment(folder))
        try:
            if killed < kills:
                _until(process, folder / "ledger.jsonl", draw.randint(1, most), deadline)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(draw.uniform(0.0, 1.0))
                process.kill()
            code = process.wait(deadline - time.monotonic())
        finally:
            process.kill()
            process.wait()
        if code != -signal.SIGKILL:
            assert code == 0, log.read_text()
            return killed
        killed += 1
    raise AssertionError(f"the study is not over after {seconds:g} s\n{log.read_text()}")


def _until(process: subprocess.Popen[bytes], ledger: Path, events: int, deadline: float) -> None:
    """Until the ledger has so many new events, or the process has ended."""
    before = _events(ledger)
    while _events(ledger) < before + events and time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            return


def _events(ledger: Path) -> int:
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


def steps_of(folders: list[Path], project: str) -> Counter[tuple[str, int]]:
    """How often each run was started (step 0) and each of its steps was trained."""
    lines = [one for folder in folders for one in told(folder / "steps.jsonl")]
    return Counter((one["run"], one["step"]) for one in lines if one["study"] == project)


def check(state: State, steps: Counter[tuple[str, int]]) -> None:
    """None done twice, none lost."""
    assert state.finished is not None and all(one.verdict for one in state.experiments.values())
    twice = {key: count for key, count in steps.items() if count > 1}
    assert not twice, twice
    for name, run in state.runs.items():
        assert run.outcome is not None, name
        trained = max((step for (one, step) in steps if one == f"{name}.{run.attempt}"), default=0)
        assert trained >= max(run.scores), name


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--experiments", type=int, default=len(LRS))
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="training steps of each run")
    parser.add_argument("--most", type=int, default=9, help="events between two kills")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # the last one is the best
    grid = {"kind": "grid", "space": {"lr": LRS[-arguments.experiments :]}}
    job = declared()["job"] | {"total_training_steps": arguments.steps}
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        top = Path(made)
        folders = [top / f"server{number}" for number in range(arguments.servers)]
        urls = [stack.enter_context(server(folder)) for folder in folders]
        states: dict[str, State] = {}
        for name, kills in (("killed", arguments.kills), ("calm", 0)):
            began = time.monotonic()
            folder = study_at(top / name, urls, proposer=grid, job=job)
            killed = ran(folder, kills, random.Random(arguments.seed), arguments.most)
            state = states[name] = read(folder)
            check(state, steps_of(folders, f"study-{state.study}"))
            print(f"{name}: {killed} kills, {len(state.experiments)} experiments, {len(state.runs)} runs", end=", ")
            attempts = sum(run.attempt for run in state.runs.values())
            print(f"{attempts} attempts, {time.monotonic() - began:.0f} s: {state.finished}", flush=True)
        assert verdicts(states["calm"]) == verdicts(states["killed"]), [verdicts(one) for one in states.values()]
        folder = study_at(top / "shuffled", urls, proposer=grid, job=job, control="shuffle")
        ran(folder, 0, random.Random(0), arguments.most)
        found = verdicts(read(folder))
        print(f"shuffled: {read(folder).finished}")
        assert "kept" not in found.values()


if __name__ == "__main__":
    main()
