"""What users wait for while the model trains: a fixed rate of requests over real training steps, by serving mode.

``python -m benchmarks serving``: ``swarm-gateway up`` with the real verl and vLLM on a CPU, once for each mode in each
round, in turn. Requests are sent at their times whether or not earlier ones are answered; each is streamed, every other
one with ``x-swarm-policy: first``, whose chunks come as they are sampled. The default model is random and tiny, for a
look that takes minutes; ``--model smollm2-135m --steps 30 --rate 0.2`` is the form whose figures mean something.

For each mode: latency of requests that were sent while a step was computed, and of the others; the longest time without
a chunk inside an answer (of those that came live), and the longest transfer of weights beside it; answers that were
refused, aborted, failed, or not trained; steps per hour.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import yaml

from swarm.job import ServingMode

ROOT = Path(__file__).parent.parent
MODES: tuple[ServingMode, ...] = get_args(ServingMode)
GROUPS, ANSWERS = 4, 4
BOOT_SECONDS, STEP_SECONDS, STOP_SECONDS, ANSWER_SECONDS = 900.0, 900.0, 180.0, 600.0
#: the reward is only there to differ
HOOKS = """
from reward_hooks import Hooks, Reward


def on_compute_relative_reward(task, candidates, context):
    return [Reward(value=sum(map(str.isalpha, one.text)) / max(1, len(one.text))) for one in candidates]


hooks = Hooks(reward=on_compute_relative_reward, source=__name__)
"""


@dataclass
class Sample:
    """One request; seconds since the load began. ``ended``: served, refused (no answer), aborted (cut) or failed."""

    sent: float
    live: bool
    seconds: float = 0.0
    longest_gap: float = 0.0
    ended: str = "failed"
    untrained: str = ""


@dataclass
class Arm:
    """One run under one mode: its requests, and when steps were computed and weights transferred, from and to."""

    mode: str
    samples: list[Sample] = field(default_factory=list[Sample])
    computed: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    transferred: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    steps: int = 0
    seconds: float = 0.0


async def load(urls: dict[str, str], options: argparse.Namespace, arm: Arm) -> None:
    """Send requests until ``options.steps`` steps are done."""
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_SECONDS) as http:
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_watch(http, urls["swarm server"], arm, options.steps, began))
            number = 0
            while not watching.done():
                sample = Sample(sent=time.monotonic() - began, live=number % 2 == 1)
                arm.samples.append(sample)
                tasks.create_task(_ask(http, urls["gateway"], sample, number, options))
                number += 1
                # the time of a request does not depend on how long the ones before took
                await asyncio.wait({watching}, timeout=max(0.0, began + number / options.rate - time.monotonic()))


async def _ask(http: httpx.AsyncClient, gateway: str, sample: Sample, number: int, options: argparse.Namespace) -> None:
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": f"Question {number}: what do you think of the number {number * 7}?"}],
        "max_tokens": options.tokens,
        "stream": True,
    }
    began = last = time.monotonic()
    finish = ""
    try:
        headers = {"x-swarm-policy": "first"} if sample.live else {}
        async with http.stream("POST", f"{gateway}/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                sample.ended = "refused" if answer.status_code in (429, 503) else "failed"
                return
            sample.untrained = answer.headers.get("x-swarm-drop-reason", "")
            chunks = 0
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    finish = "error"
                    break
                now = time.monotonic()
                if chunks:
                    sample.longest_gap = max(sample.longest_gap, now - last)
                last, chunks = now, chunks + 1
                finish = next((one["finish_reason"] for one in chunk["choices"] if one["finish_reason"]), finish)
        sample.ended = "served" if finish in ("stop", "length") else "aborted"
    except httpx.HTTPError as exc:
        sample.ended = f"failed: {type(exc).__name__}"
    finally:
        sample.seconds = time.monotonic() - began


async def _watch(http: httpx.AsyncClient, server: str, arm: Arm, steps: int, began: float) -> None:
    """Note when steps are computed and weights transferred, until ``steps`` steps are done."""
    deadline = began + STEP_SECONDS * steps
    computing: float | None = None
    transferring: float | None = None
    while True:
        status = (await http.get(f"{server}/status", params={"steps": 0})).raise_for_status().json()
        now = time.monotonic() - began
        if status["training_seconds"] is not None and computing is None:
            computing = max(0.0, now - status["training_seconds"])
        elif status["training_seconds"] is None and computing is not None:
            arm.computed.append((computing, now))
            computing = None
        syncs = status["engine"]["engine_status"] == "ENGINE.WEIGHT_SYNCING"
        if syncs and transferring is None:
            transferring = max(0.0, now - status["engine_seconds"])
        elif not syncs and transferring is not None:
            arm.transferred.append((transferring, now))
            transferring = None
        arm.steps, arm.seconds = status["engine"]["global_step"], now
        if arm.steps >= steps:
            arm.computed += [(computing, now)] if computing is not None else []
            return
        if status["engine_failure"] is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the engine does not train: {status['engine']} {status['engine_failure']}")
        await asyncio.sleep(0.1)


def _job(mode: ServingMode, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": str(options.model),
        "served_model_name": "policy",
        "device": "cpu",
        "batch_size": GROUPS,
        "num_repeat": ANSWERS,
        "max_prompt_length": 256,
        "max_response_length": options.tokens,
        "lr": 1e-6,
        "serving": mode,
    }


@contextmanager
def up(job: dict[str, Any], folder: Path, **environment: str) -> Generator[dict[str, str]]:
    """``swarm-gateway up`` from when it is ready to the end of the block; the addresses of its servers.

    Args:
        job: the section of that name; ``HOOKS`` give the reward.
        folder: new, for everything that it writes.
        environment: variables beside those of this process.
    """
    folder.mkdir(parents=True)
    (folder / "letters.py").write_text(HOOKS)
    sections = {
        "job": job,
        "swarm": {"port": 0, "run_dir": "run", "boot_timeout": BOOT_SECONDS},
        "gateway": {
            "port": 0,
            "hooks": "letters:hooks",
            "claim_wait_seconds": ANSWER_SECONDS,
            "routes": [{"name": job["served_model_name"]}],
        },
    }
    path = folder / "up.yaml"
    path.write_text(yaml.safe_dump(sections))
    with (folder / "up.log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "up", str(path), "--json"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield _ready(process, folder / "up.log")
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(process: subprocess.Popen[bytes], log: Path) -> dict[str, str]:
    deadline = time.monotonic() + BOOT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        events = [
            json.loads(line) for line in log.read_text().splitlines() if line.startswith("{") and line.endswith("}")
        ]
        if any(event["event"] == "ready" for event in events):
            return {event["name"]: event["url"] for event in events if event["event"] == "listening"}
        time.sleep(0.5)
    raise RuntimeError(f"`up` is not ready; the end of its output: {log.read_text()[-2000:]}")


# ---------------------------------------------------------------------- report


def summary(arms: list[Arm]) -> dict[str, Any]:
    """The figures of all runs of one mode; latencies in seconds."""
    busy = [one for arm in arms for one in arm.samples if _within(arm.computed, one.sent)]
    idle = [one for arm in arms for one in arm.samples if not _within(arm.computed, one.sent)]
    everything = busy + idle
    hourly = [arm.steps / arm.seconds * 3600 for arm in arms]
    return {
        "requests": len(everything),
        "ended": dict(Counter(one.ended for one in everything)),
        "untrained": dict(Counter(one.untrained for one in everything if one.untrained)),
        "latency_while_a_step_is_computed": _quantiles(busy),
        "latency_while_none_is": _quantiles(idle),
        "longest_stall": max((one.longest_gap for one in everything if one.live), default=0.0),
        "longest_transfer": max((end - begin for arm in arms for begin, end in arm.transferred), default=0.0),
        "steps": [arm.steps for arm in arms],
        "steps_per_hour": statistics.median(hourly),
    }


def _within(spans: list[tuple[float, float]], moment: float) -> bool:
    return any(begin <= moment < end for begin, end in spans)


def _quantiles(samples: list[Sample]) -> dict[str, float]:
    seconds = [one.seconds for one in samples if one.ended == "served"]
    if not seconds:
        return {"requests": len(samples)}
    p25, p50, p75, p99 = np.percentile(seconds, [25, 50, 75, 99]).tolist()
    return {"requests": len(samples), "p50": p50, "p25": p25, "p75": p75, "p99": p99, "longest": max(seconds)}


def plot(arms: list[Arm], path: Path) -> None:
    """Latency by the time at which a request was sent, with the times in which steps were computed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(arms), 1, squeeze=False, figsize=(9, 2.2 * len(arms)), layout="constrained")
    for (axis,), arm in zip(axes, arms, strict=True):
        for begin, end in arm.computed:
            axis.axvspan(begin, end, color="#dddddd")
        axis.scatter([one.sent for one in arm.samples], [one.seconds for one in arm.samples], s=6, color="#4c78a8")
        axis.set_title(arm.mode, fontsize="medium")
        axis.set_ylabel("latency, s")
        axis.set_ylim(bottom=0)
    axes[-1][0].set_xlabel("request sent, s (grey: a step is computed)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or known name; default: a random tiny one")
    parser.add_argument("--steps", type=int, default=6, help="training steps of each run")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each mode, in turn")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--only", choices=MODES, nargs="+", default=MODES)
    parser.add_argument("--json", type=Path, help="write the report, with all samples, there")
    parser.add_argument("--plot", type=Path, help="draw all latencies there")


def run(options: argparse.Namespace) -> None:
    arms: list[Arm] = []
    with tempfile.TemporaryDirectory() as place:
        if options.model is None:
            from tests.engine import tiny_model

            options.model = tiny_model.build(Path(place) / "tiny")
        for number in range(options.rounds):
            for mode in options.only:
                print(f"round {number + 1}: {mode}", file=sys.stderr, flush=True)
                arms.append(arm := Arm(mode))
                with up(_job(mode, options), Path(place) / f"{number}-{mode}") as urls:
                    asyncio.run(load(urls, options, arm))
    modes = {mode: summary([arm for arm in arms if arm.mode == mode]) for mode in options.only}
    report: dict[str, Any] = {
        "model": str(options.model),
        "rate": options.rate,
        "tokens": options.tokens,
        "load": os.getloadavg()[0],
        "modes": modes,
    }
    if set(modes) == set(MODES):
        report["steps_per_hour_ratio"] = modes["always"]["steps_per_hour"] / modes["between_steps"]["steps_per_hour"]
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report | {"runs": [asdict(arm) for arm in arms]}) + "\n")
    if options.plot is not None:
        plot(arms, options.plot)
