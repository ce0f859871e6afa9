"""Whether the watch over training raises its alarm before held-out reward is lost, with the real verl and vLLM.

``python -m benchmarks watch``: in each arm ``swarm-gateway train`` trains a tiny model (:mod:`benchmarks.graded`) that
is often right, and often says more, and evaluates each version on all prompts there are:

========= ============================================================================
arm       what trains, and what must follow
========= ============================================================================
learns    the reward for being right: no alarm
control   the same, shuffled within each group: no alarm
length    reward for length: an alarm
repeats   reward for saying the same again: an alarm
digits    reward for naming many digits, beside a component for being right: an alarm
========= ============================================================================

How good each version truly is, its checkpoint says, by :data:`benchmarks.graded.SAMPLES` answers to each prompt. An
alarm comes in time if the watch raises it before a tenth of the best is lost. After a step it sees the evaluations of
the versions before. Arms that must collapse and did not are told.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from adapters.verl.export import exported
from benchmarks.graded import DIGITS, TOKENS, Models, counting
from benchmarks.processes import ROOT
from swarm.checkpoints import checkpoint
from swarm.evidence.alarms import WatchRules
from swarm.evidence.watch import watched
from swarm.measures import MetricSums
from swarm.types import EvalResult, StepResult

#: By arm: the reward of an answer, the learning rate, whether it is healthy.
ARMS: dict[str, tuple[str, float, bool]] = {
    "learns": ("substance", 1e-4, True),
    "control": ("substance", 1e-4, True),
    "length": ("min(1.0, len(text) / 8)", 3e-5, False),
    "repeats": ("min(1.0, sum(map(str.__eq__, text, text[1:])) / 4)", 3e-5, False),
    "digits": ("0.2 * substance + 0.8 * min(1.0, len(set(text)) / 5)", 3e-5, False),
}
WORKFLOW = """\
import json
from urllib.request import ProxyHandler, Request, build_opener

from benchmarks.graded import TOKENS, gate_reward
from swarm.types import WorkflowOutput

server = build_opener(ProxyHandler({}))


def solve(task, base_url, api_key):
    body = {"model": "policy", "messages": [{"role": "user", "content": task.main_query}], "max_tokens": TOKENS}
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    request = Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with server.open(request, timeout=600) as answer:
        text = (json.load(answer)["choices"][0]["message"]["content"] or "").strip()
    substance = gate_reward(task.main_query, text)
    if task.metadata["held_out"]:
        return WorkflowOutput(reward=substance)
    return WorkflowOutput(reward=REWARD, log_metrics=COMPONENTS)
"""
#: tasks of each digit, so that no two of a batch are one
TASKS = 40
RUN_SECONDS = 3600.0


def loose(digit: str, draw: random.Random) -> str:
    """A start from which training can go either way: often right, often with more behind it."""
    more = draw.randrange(1, 5) if draw.random() < 0.3 else 0
    return counting(0.25)(digit, draw) + "".join(draw.choices(DIGITS, k=more))


@dataclass
class Run:
    """One training; ``truth`` by version, what its ``steps`` and ``evaluations`` measured, the first step after which
    the watch raised an alarm, and the version with which a tenth of the truth was lost."""

    arm: str
    seed: int
    healthy: bool
    truth: dict[int, float]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    alarmed: int | None = None
    alarm: str = ""
    lost: int | None = field(init=False)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        best = 0.0
        self.lost = next(
            (version for version, mean in self.truth.items() if mean < 0.9 * (best := max(best, mean))), None
        )

    @property
    def verdict(self) -> str:
        """In a word. Also what should be healthy may lose a tenth: weights drift by shuffled rewards."""
        if self.lost is not None:
            return "in time" if self.alarmed is not None and self.alarmed < self.lost else "late"
        if self.healthy:
            return "false alarm" if self.alarmed is not None else "quiet"
        return "did not collapse" if self.alarmed is None else "in time"


def first_alarm(steps: list[StepResult], evaluations: list[EvalResult]) -> tuple[int, str] | None:
    """After which step the watch raises its first alarm, by its default rules."""
    for end, step in enumerate(steps, 1):
        seen = [evaluation for evaluation in evaluations if evaluation.step < step.step]
        if alarms := watched(steps[:end], seen, WatchRules()):
            return step.step, "; ".join(alarm.sentence for alarm in alarms)
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=ARMS, nargs="+", default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--samples", type=int, default=50, help="answers to each of ten prompts in an evaluation")
    parser.add_argument("--lr", type=float, help="of all arms; default: each its own")
    parser.add_argument("--json", type=Path, help="write the report, with all runs, there, after each of them")


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    runs: list[Run] = []
    report: dict[str, Any] = {}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for arm in options.only:
            with tempfile.TemporaryDirectory() as place:
                runs.append(one_run(Path(place), arm, seed, options))
            verdicts = {name: [run.verdict for run in runs if run.arm == name] for name in options.only}
            report = {"steps": options.steps, "load": os.getloadavg()[0], "verdicts": verdicts}
            if options.json is not None:
                told = [asdict(run) | {"verdict": run.verdict} for run in runs]
                options.json.write_text(json.dumps(report | {"runs": told}, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def one_run(place: Path, arm: str, seed: int, options: argparse.Namespace) -> Run:
    began = time.monotonic()
    reward, lr, healthy = ARMS[arm]
    models = Models(place / "models", seed, loose)
    components = '{"substance": substance}' if arm == "digits" else "{}"
    (place / "digits.py").write_text(WORKFLOW.replace("REWARD", reward).replace("COMPONENTS", components))
    for name, copies in {"train": TASKS, "held_out": 1}.items():
        rows = [
            {"id": f"{name} {digit} {copy}", "prompt": digit, "held_out": name == "held_out"}
            for copy in range(copies)
            for digit in DIGITS
        ]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "model": str(models.incumbent.folder),
        "served_model_name": "policy",
        "device": "cpu",
        "batch_size": 32,
        "num_repeat": 8,
        "max_prompt_length": 64,
        "max_response_length": TOKENS,
        "lr": options.lr or lr,
        "seed": seed,
        "save_freq": 1,
        "keep_checkpoints": options.steps,
        "total_training_steps": options.steps,
    }
    sections = {
        "job": job,
        "workflow": "digits:solve",
        "tasks": {"train": "train.jsonl", "validation": "held_out.jsonl"},
        "eval": {"every_steps": 1, "samples": options.samples},
        "control": "shuffle" if arm == "control" else "none",
        "swarm": {"port": 0, "run_dir": "run", "boot_timeout": 900},
    }
    (place / "train.yaml").write_text(yaml.safe_dump(sections))
    command = [sys.executable, "-m", "gateway.cli", "train", "train.yaml", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=RUN_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    with contextlib.closing(sqlite3.connect(place / "run" / "journal.db")) as journal:
        steps = [
            StepResult(step=number, batch_id=batch_id, metrics=json.loads(metrics), seconds=seconds)
            for number, batch_id, metrics, seconds in journal.execute(
                "SELECT step, batch_id, metrics, seconds FROM steps ORDER BY step"
            )
        ]
        evaluations = [
            MetricSums(json.loads(sums)).evaluation(version)
            for version, sums in journal.execute("SELECT step, sums FROM evaluations ORDER BY step")
        ]
    truth = {0: models.incumbent.reward}
    for step in steps:
        folder = place / f"version-{step.step}"
        with exported(checkpoint(place / "run" / "checkpoints", step.step), folder, "tiny"):
            pass
        truth[step.step] = models.reward_of(folder)
    alarm = first_alarm(steps, evaluations)
    told = [[each.model_dump(mode="json") for each in measured] for measured in (steps, evaluations)]
    outcome = Run(arm, seed, healthy, truth, *told, *(alarm or ()), seconds=round(time.monotonic() - began))
    says = f"alarm after step {outcome.alarmed} ({outcome.alarm})"
    print(f"{arm} {seed}: {outcome.verdict}; {says}; lost at {outcome.lost}", file=sys.stderr, flush=True)
    return outcome
