"""Studies for tests: a folder under version control, and a lab whose scores depend on the settings alone."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from swarm.research.decisions import RunEnding, is_due
from swarm.research.lab import Order
from swarm.research.study import Study

AGENT = """
from swarm.types import WorkflowOutput

WEIGHT = 1

def solve(task, base_url, api_key, weight=1.0):
    return WorkflowOutput(reward=0.0)
"""
EVALUATE = """
from swarm.types import WorkflowOutput

def score(task, base_url, api_key):
    return WorkflowOutput(reward=0.0)
"""
LRS = [1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 6e-6, 7e-6, 8e-6, 9e-6, 1e-5, 2e-5, 3e-5]


def declared(**changes: Any) -> dict[str, Any]:
    """A valid ``study.yaml``: 12 learning rates, of which the last one is best."""
    return {
        "question": "Which learning rate?",
        "job": {"model": "m", "batch_size": 2, "num_repeat": 2, "lr": 1e-6, "total_training_steps": 4},
        "workflow": "agent:solve",
        "settings": {"weight": 1.0},
        "tasks": "train.jsonl",
        "evaluator": {"workflow": "evaluate:score", "tasks": "held_out.jsonl", "every_steps": 2},
        "locked": ["evaluate.py", "held_out.jsonl"],
        "patch_paths": ["agent.py", "more/"],
        "proposer": {"kind": "grid", "space": {"lr": LRS}},
        "budget": {"runs": 40},
        **changes,
    }


def study_of(**changes: Any) -> Study:
    return Study.model_validate(declared(**changes))


def folder_of(folder: Path, **changes: Any) -> Path:
    """A study in a git checkout."""
    folder.mkdir(parents=True)
    files = {"agent.py": AGENT, "evaluate.py": EVALUATE, "study.yaml": yaml.safe_dump(declared(**changes))}
    for name in ("train", "held_out"):
        files[f"{name}.jsonl"] = "".join(json.dumps({"question": f"{name} {n}"}) + "\n" for n in range(6))
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / ".gitignore").write_text("runs/\n")
    return tracked(folder)


def tracked(folder: Path) -> Path:
    """``folder`` as a git checkout that tracks all its files."""
    for command in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    return folder


def scores_of(lr: float, seed: int, shuffle: bool, step: int) -> list[float]:
    """By held-out task: better with the learning rate and the step, unless rewards are shuffled."""
    draw = random.Random(int(hashlib.sha256(f"{lr}/{seed}/{shuffle}".encode()).hexdigest()[:8], 16))
    learnt = 0.0 if shuffle else min(1.0, lr / 3e-5) * step / 10
    level = learnt + draw.gauss(0, 0.002) * step
    return [0.2 + 0.01 * task + level + draw.gauss(0, 0.001) for task in range(6)]


class ScriptedLab:
    """Swarm servers whose engines live in ``log``: a line for each start, step and evaluation, each one write.

    Args:
        point: called between any two things that happen.
    """

    def __init__(self, study: Study, log: Path, point: Callable[[], None] = lambda: None) -> None:
        self._study, self._point, self._path = study, point, log
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _write(self, **fields: Any) -> None:
        self._point()
        os.write(self._log, json.dumps(fields).encode() + b"\n")
        self._point()

    def run(self, server: str, order: Order, stopping: threading.Event) -> RunEnding | None:
        lines = [one for one in told(self._path) if one["server"] == server]
        running = [one for one in lines if "start" in one]
        step = 0
        if not running or running[-1]["start"] != order.name:
            self._write(server=server, start=order.name)
        else:
            step = max((one["step"] for one in lines if one.get("of") == order.name), default=0)
        measured = set(order.measured)
        while True:
            if is_due(self._study, order.run, step) and step not in measured:
                scores = scores_of(order.job.lr, order.job.seed, order.shuffle, step)
                self._write(server=server, evaluated=order.name, at=step)
                if end := order.measure(step, scores, {step: scores[0]}):
                    return end
            if stopping.is_set():
                return None
            step += 1
            self._write(server=server, of=order.name, step=step)
            order.on_step(step)

    def release(self, server: str) -> None:
        self._write(server=server, released=True)


def told(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def doubles(log: Path) -> list[tuple[str, int]]:
    """Steps of runs that were trained more than once."""
    steps = Counter((one["of"], one["step"]) for one in told(log) if "of" in one)
    return [step for step, count in steps.items() if count > 1]
