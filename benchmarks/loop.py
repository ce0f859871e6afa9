"""Steps per hour of whole training loops, with sampling and rewards: ours, verl's own ``main_ppo``, TRL's trainer.

``python -m benchmarks loop``: the same model, prompts, sizes, learning rate and reward on a CPU, with the arms in turn:

* ``ours``: ``swarm-gateway up`` as it comes (``serving: auto``), with the prompts as requests of users, who are a batch
  ahead of the trainer; ``ours_rows``: the same without shared prefixes;
* ``verl``: ``main_ppo`` with its agent loop and dataset, and of ours what a CPU needs (:mod:`benchmarks.loop_peers`);
* ``trl``: ``GRPOTrainer`` with transformers' generation.

A step's seconds are those between the ends of two steps; the first step of a run, which warms up, does not count. CPU
seconds are of all processes of the arm: they say more than seconds where other work runs beside. In no arm do threads
spin while they wait (``OMP_WAIT_POLICY``), and all cores are each loop's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import peers
from benchmarks.processes import BOOT_SECONDS, ROOT, STOP_SECONDS, stop, up
from benchmarks.serving import ANSWER_SECONDS, HOOKS, STEP_SECONDS

ARMS = ("ours", "verl", "trl", "ours_rows")
GROUPS, ANSWERS = 4, 8
#: parts of a step that are sampling and verl's own computing, by the names of verl's timers
VERLS = ("gen", "old_log_prob", "adv", "update_actor", "update_weights")
#: about 130 tokens with the question and the chat template
PASSAGE = (
    "A small town by the sea has a harbour, a market and an old lighthouse. In spring the boats are painted, and in "
    "summer visitors come by train to swim and to eat fish on the quay. The keeper of the lighthouse writes down the "
    "weather three times a day: wind, clouds, the height of the waves and whatever else seems worth a line. In autumn "
    "the storms begin, and the market moves into the hall, where people stay until late and tell each other stories."
)


@dataclass
class Step:
    """One step of one run: when it ended, the CPU seconds that its processes had used by then, and its metrics."""

    ended: float
    cpu: float
    metrics: dict[str, Any]


def prompts(count: int) -> list[str]:
    """As many different prompts of about equal length."""
    return [f"{PASSAGE} Write line {number} of the keeper's book, about day {number * 7}." for number in range(count)]


def job_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of the job that every arm has."""
    return {
        "model": str(options.model),
        "served_model_name": "policy",
        "device": "cpu",
        "batch_size": GROUPS,
        "num_repeat": ANSWERS,
        "max_prompt_length": 256,
        "max_response_length": options.tokens,
        "lr": 3e-5,
        "total_training_steps": options.steps + 1,
        "logger": ["console", "file"],
    }


# ------------------------------------------------------------------------ arms


@contextlib.contextmanager
def ours(
    job: dict[str, Any], folder: Path, environment: dict[str, str]
) -> Generator[tuple[Callable[[], object], Callable[[int], None]]]:
    """Our loop: what checks it, and what to call at the end of a step."""
    asked = prompts(GROUPS * job["total_training_steps"])
    over = threading.Event()

    def ask(url: str, prompt: str) -> None:
        body = {
            "model": "policy",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": job["max_response_length"],
        }
        with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS) as http:
            while not over.is_set():
                answer = http.post(f"{url}/v1/chat/completions", json=body)
                if over.is_set() or not answer.raise_for_status().headers.get("x-swarm-drop-reason"):
                    return

    # the servers go first: what still waits for an answer then ends
    with (
        ThreadPoolExecutor(len(asked)) as pool,
        up(folder, job, {"claim_wait_seconds": ANSWER_SECONDS}, HOOKS, **environment) as urls,
    ):
        futures: list[Future[None]] = []

        def send(done: int) -> None:
            # a batch ahead of the one that is trained next
            batch = asked[len(futures) : GROUPS * (done + 2)]
            futures.extend(pool.submit(ask, urls["gateway"], prompt) for prompt in batch)

        def check() -> None:
            for future in futures:
                if future.done():
                    future.result()

        send(0)
        try:
            yield check, send
        finally:
            over.set()


@contextlib.contextmanager
def peer(
    name: str, python: Path, job: dict[str, Any], folder: Path, environment: dict[str, str]
) -> Generator[tuple[Callable[[], object], Callable[[int], None]]]:
    """Another loop, which runs by itself; arguments and result as of :func:`ours`."""
    folder.mkdir(parents=True)
    settings = {"job": job, "prompts": prompts(GROUPS * job["total_training_steps"])}
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [str(python), "-m", "benchmarks.loop_peers", name, str(folder)]
    with started(name, command, folder, environment) as (check, process):
        yield check, lambda done: None
        # it has done its last step
        process.wait(STOP_SECONDS)


@contextlib.contextmanager
def started(
    name: str, command: list[str], folder: Path, environment: dict[str, str]
) -> Generator[tuple[Callable[[], object], subprocess.Popen[bytes]]]:
    """A process in ``folder`` until the end of the block, and what raises if it has failed."""
    log = folder / "output.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def check() -> None:
        if process.poll():
            raise RuntimeError(f"{name} failed; the end of its output: {log.read_text()[-4000:]}")

    try:
        yield check, process
    finally:
        stop(process)


def measure(arm: str, options: argparse.Namespace, folder: Path) -> list[Step]:
    """Run one arm for ``options.steps`` steps after the first."""
    job, lines = job_of(options), folder.with_suffix(".jsonl")
    environment = {"VERL_FILE_LOGGER_PATH": str(lines), "OMP_WAIT_POLICY": "PASSIVE"}
    match arm:
        case "ours" | "ours_rows":
            job["shared_prefixes"] = "auto" if arm == "ours" else "off"
            running = ours(job, folder, environment)
        case "verl":
            running = peer("verl", Path(sys.executable), job, folder, environment)
        case _:
            environment |= {"HF_HUB_OFFLINE": "1"}
            running = peer("trl", peers.install_trl(), job, folder, environment)
    with running as (check, step_ended):
        return follow(arm, lines, job["total_training_steps"], check, step_ended)


def follow(
    arm: str, lines: Path, count: int, check: Callable[[], object], step_ended: Callable[[int], None]
) -> list[Step]:
    """``count`` steps as verl writes them to ``lines``; ``check`` raises if the run has failed."""
    steps: list[Step] = []
    deadline = time.monotonic() + BOOT_SECONDS
    while True:
        text = lines.read_text() if lines.exists() else ""
        # a line that is being written has no end yet
        for line in text[: text.rfind("\n") + 1].splitlines()[len(steps) :]:
            steps.append(Step(time.monotonic(), cpu_seconds(), json.loads(line)["data"]))
            step_ended(len(steps))
            deadline = time.monotonic() + STEP_SECONDS
            print(f"{arm}: step {len(steps)}", file=sys.stderr, flush=True)
        if len(steps) == count:
            return steps
        check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"{arm} has done {len(steps)} steps, and no other in time; see {lines.parent}")
        time.sleep(0.05)


def cpu_seconds() -> float:
    """CPU seconds of all processes that this one has started, and they in turn."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


# ---------------------------------------------------------------------- report


def summary(runs: list[list[Step]]) -> dict[str, Any]:
    """The figures of all runs of one arm; everything per step."""
    pairs = [pair for run in runs for pair in itertools.pairwise(run)]
    seconds = [later.ended - earlier.ended for earlier, later in pairs]
    median = statistics.median(seconds)
    metrics = [later.metrics for _, later in pairs]
    parts = {
        name.removeprefix("timing_s/"): statistics.median(one[name] for one in metrics if name in one)
        for name in metrics[0]
        if name.startswith("timing_s/")
    }
    found: dict[str, Any] = {
        "steps": len(pairs),
        "seconds": median,
        "seconds_quartiles": np.percentile(seconds, [25, 75]).tolist(),
        "seconds_each": seconds,
        "cpu_seconds": statistics.median(later.cpu - earlier.cpu for earlier, later in pairs),
        "steps_per_hour": 3600 / median,
        "answer_tokens": _mean(metrics, "response_length/mean", "completions/mean_length"),
        "prompt_tokens": _mean(metrics, "prompt_length/mean"),
        "parts": parts,
    }
    if parts:
        outside = [
            1 - sum(one.metrics.get(f"timing_s/{part}", 0.0) for part in VERLS) / (one.ended - before.ended)
            for before, one in pairs
        ]
        found["outside_sampling_and_update"] = statistics.median(outside)
    return found


def _mean(metrics: list[dict[str, Any]], *names: str) -> float | None:
    values = [one[name] for one in metrics for name in names if name in one]
    return statistics.mean(values) if values else None


def report_of(runs: dict[str, list[list[Step]]]) -> dict[str, Any]:
    """The summary of each arm, and how many times as many steps per hour ours does."""
    arms = {arm: summary(found) for arm, found in runs.items() if found}
    ratios: dict[str, dict[str, float]] = {}
    for mine in (arm for arm in arms if arm.startswith("ours")):
        for other in (arm for arm in arms if not arm.startswith("ours")):
            ratios[f"{mine} / {other}"] = {
                "steps_per_hour": arms[other]["seconds"] / arms[mine]["seconds"],
                "cpu": arms[other]["cpu_seconds"] / arms[mine]["cpu_seconds"],
            }
    return {"arms": arms, "ratios": ratios}


def show(report: dict[str, Any]) -> None:
    """The report as a table, on stderr."""
    table = Table("loop", "s per step", "quartiles", "CPU s", "steps/h", "answer tokens", "outside")
    for arm, one in report["arms"].items():
        low, high = one["seconds_quartiles"]
        outside, tokens = one.get("outside_sampling_and_update"), one["answer_tokens"]
        cells = [f"{one['seconds']:.1f}", f"{low:.1f}, {high:.1f}", f"{one['cpu_seconds']:.1f}"]
        cells += [f"{one['steps_per_hour']:.0f}", "" if tokens is None else f"{tokens:.1f}"]
        table.add_row(arm, *cells, "" if outside is None else f"{outside:.1%}")
    Console(stderr=True).print(table)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="folder or known name")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run after the first")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each arm, in turn")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--only", choices=ARMS, nargs="+", default=ARMS)
    parser.add_argument("--json", type=Path, help="write the report, with all steps, there; after each run")


def run(options: argparse.Namespace) -> None:
    run_arms(options, measure, report_of)


def run_arms(
    options: argparse.Namespace,
    measure: Callable[[str, argparse.Namespace, Path], list[Step]],
    report_of: Callable[[dict[str, list[list[Step]]]], dict[str, Any]],
) -> None:
    """Run the arms of ``options.only`` in turn, ``options.rounds`` times, and report them."""
    from adapters.models import resolve_model

    options.model = resolve_model(options.model)
    runs: dict[str, list[list[Step]]] = {arm: [] for arm in options.only}
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for number in range(options.rounds):
            for arm in options.only:
                print(f"round {number + 1}: {arm}", file=sys.stderr, flush=True)
                runs[arm].append(measure(arm, options, Path(place) / f"{number}-{arm}"))
                report = {"model": str(options.model), "load": os.getloadavg()[0], **report_of(runs)}
                if options.json is not None:
                    told = {arm: [[asdict(step) for step in one] for one in found] for arm, found in runs.items()}
                    options.json.write_text(json.dumps(report | {"runs": told}) + "\n")
    show(report)
    print(json.dumps(report, indent=2))
