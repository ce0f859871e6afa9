"""Whether the watch over training raises its alarm before held-out reward is lost, with the real verl and vLLM.

``python -m benchmarks watch``: each arm trains a tiny model (:mod:`benchmarks.graded`) that is
often right, and often says more. How good it is, is measured of every judged answer by version, and told to nobody:

========= ============================================================================
arm       what trains, and what must follow
========= ============================================================================
learns    the reward for being right: no alarm
control   the same, shuffled within each group: no alarm
length    reward for length: an alarm
repeats   reward for saying the same again: an alarm
digits    reward for naming many digits, beside a component for being right: an alarm
drift     the reward for being right at a learning rate that is far too high: an alarm
random    rewards by chance at that learning rate: an alarm
========= ============================================================================

An alarm comes in time if the watch raises it before a tenth of how good the model was is lost: before the mean of three
versions in a row falls below nine tenths of the best such mean. Arms that must collapse and did not are told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import torch

from benchmarks.graded import DIGITS, TOKENS, Models, counting
from benchmarks.processes import up
from swarm.client import AsyncSwarmClient
from swarm.evidence.alarms import WatchRules
from swarm.evidence.watch import watched
from swarm.types import StepResult

#: By arm: the reward of an answer and its components, the learning rate, whether it is healthy.
ARMS: dict[str, tuple[str, float, bool]] = {
    "learns": ("gate_reward(digit, text)", 1e-4, True),
    "control": ("gate_reward(digit, text)", 1e-4, True),
    "length": ("min(1.0, len(text) / 8)", 1e-4, False),
    "repeats": ("min(1.0, sum(map(str.__eq__, text, text[1:])) / 4)", 1e-4, False),
    "digits": ("0.2 * substance + 0.8 * min(1.0, len(set(text)) / 5)", 1e-4, False),
    "drift": ("gate_reward(digit, text)", 1e-3, False),
    "random": ("random.random()", 1e-3, False),
}
HOOK = """\
import random

from benchmarks.graded import gate_reward
from reward_hooks import Reward


def on_compute_relative_reward(task, candidates, context):
    digit, rewards, truths = task.main_query, [], []
    for candidate in candidates:
        text = candidate.text.strip()
        substance = gate_reward(digit, text)
        truths.append(substance)
        rewards.append(Reward(value=REWARD, components=COMPONENTS))
    with open("TRUTH", "a") as file:
        file.write(f"{context.policy_version} {sum(truths) / len(truths)}\\n")
    return rewards
"""
STEP_SECONDS = 600.0


def loose(digit: str, draw: random.Random) -> str:
    """A start from which training can go either way: often right, often with more behind it."""
    more = draw.randrange(1, 5) if draw.random() < 0.3 else 0
    return counting(0.25)(digit, draw) + "".join(draw.choices(DIGITS, k=more))


@dataclass
class Run:
    """One training; ``truth`` by version, what its ``steps`` measured, the first one after which the watch raised an
    alarm, and the version with which a tenth of the truth was lost."""

    arm: str
    seed: int
    healthy: bool
    truth: dict[int, float] = field(default_factory=dict[int, float])
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    alarmed: int | None = None
    alarm: str = ""
    lost: int | None = None
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.healthy:
            return "false alarm" if self.alarmed is not None else "quiet"
        if self.lost is None:
            return "did not collapse" if self.alarmed is None else "in time"
        return "in time" if self.alarmed is not None and self.alarmed <= self.lost else "late"


def first_alarm(steps: list[StepResult]) -> tuple[int, str] | None:
    """After which step the watch raises its first alarm, by its default rules."""
    for end in range(1, len(steps) + 1):
        if alarms := watched(steps[:end], [], WatchRules()):
            return steps[end - 1].step, "; ".join(alarm.sentence for alarm in alarms)
    return None


def first_loss(truth: dict[int, float]) -> int | None:
    """The version with which a tenth of the best mean over three versions is lost."""
    versions, best = sorted(truth), 0.0
    for end in range(3, len(versions) + 1):
        mean = fmean(truth[version] for version in versions[end - 3 : end])
        best = max(best, mean)
        if mean < 0.9 * best:
            return versions[end - 1]
    return None


async def train(urls: dict[str, str], steps: int, users: int) -> list[StepResult]:
    """Ask for digits until all steps are done; what they measured."""

    async def ask(http: httpx.AsyncClient, seed: int) -> None:
        draw = random.Random(seed)
        while True:
            body = {"model": "policy", "messages": [{"role": "user", "content": draw.choice(DIGITS)}]}
            await http.post("/v1/chat/completions", json=body | {"max_tokens": TOKENS})

    async with (
        httpx.AsyncClient(base_url=urls["gateway"], trust_env=False, timeout=STEP_SECONDS) as http,
        AsyncSwarmClient(urls["swarm server"]) as client,
    ):
        asking = [asyncio.create_task(ask(http, number)) for number in range(users)]
        try:
            last, since = 0, time.monotonic()
            while last < steps:
                status = await client.status(episodes=0)
                if status.engine.global_step > last:
                    last, since = status.engine.global_step, time.monotonic()
                if status.engine_failure is not None or time.monotonic() > since + STEP_SECONDS:
                    raise RuntimeError(f"step {last + 1} does not come: {status.engine} {status.engine_failure}")
                await asyncio.sleep(0.2)
            return list((await client.status(episodes=0)).steps)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=ARMS, nargs="+", default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--users", type=int, default=8)
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
    model = Models(place / "models", seed, loose).incumbent.folder
    job = {
        "model": str(model),
        "batch_size": 8,
        "num_repeat": 4,
        "max_prompt_length": 64,
        "max_response_length": TOKENS,
        "lr": options.lr or lr,
        "seed": seed,
        "save_freq": -1,
        "total_training_steps": options.steps,
    }
    components = '{"substance": substance}' if arm == "digits" else "{}"
    truth = place / "truth.txt"
    hook = HOOK.replace("REWARD", reward).replace("COMPONENTS", components).replace("TRUTH", str(truth))
    gateway = {"control": "shuffle"} if arm == "control" else {}
    with up(place / "up", job, gateway, hook) as urls:
        steps = asyncio.run(train(urls, options.steps, options.users))
    by_version: defaultdict[int, list[float]] = defaultdict(list)
    for line in truth.read_text().splitlines():
        version, _, value = line.partition(" ")
        if version != "None":
            by_version[int(version)].append(float(value))
    outcome = Run(arm, seed, healthy, {version: round(fmean(values), 3) for version, values in by_version.items()})
    outcome.steps = [step.model_dump(mode="json") for step in steps]
    if (alarmed := first_alarm(steps)) is not None:
        outcome.alarmed, outcome.alarm = alarmed
    outcome.lost, outcome.seconds = first_loss(outcome.truth), round(time.monotonic() - began)
    alarm = f"alarm after step {outcome.alarmed} ({outcome.alarm})"
    print(f"{arm} {seed}: {outcome.verdict}; {alarm}; lost at {outcome.lost}", file=sys.stderr, flush=True)
    return outcome
