"""What users wait for while the model trains: a fixed rate of requests over real training steps, by serving mode.

``python -m benchmarks serving``: ``swarm-gateway up`` with the real verl and vLLM on a CPU, once for each mode in each
round, in turn. Requests are sent at their times whether or not earlier ones are answered; each is streamed, every other
one with ``x-swarm-policy: first``, whose chunks come as they are sampled. The default model is random and tiny, for a
look that takes minutes; ``--model smollm2-135m --steps 30 --rate 0.2`` is the form whose figures mean something.

For each mode: latency of requests that were sent while a step was computed, and of the others; for each weight sync
under an answer that came live, how long the transfer took and the longest time without a chunk around it; answers that
were refused, aborted, failed, or not trained; steps per hour. ``--when-batch-waits best single`` compares these two,
each with each mode.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
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

from benchmarks.processes import up
from gateway.config.route import WhenBatchWaits
from swarm.job import ServingMode

MODES: tuple[ServingMode, ...] = get_args(ServingMode)
GROUPS, ANSWERS = 4, 4
STEP_SECONDS, ANSWER_SECONDS = 900.0, 600.0
#: the reward is only there to differ
HOOKS = """
from reward_hooks import Reward


def on_compute_relative_reward(task, candidates, context):
    return [Reward(value=sum(map(str.isalpha, one.text)) / max(1, len(one.text))) for one in candidates]
"""


@dataclass
class Sample:
    """One request; seconds since the load began. ``gap``: from when to when no chunk came for the longest time;
    ``ended``: served, refused (no answer), aborted (cut) or failed."""

    sent: float
    live: bool
    seconds: float = 0.0
    gap: tuple[float, float] = (0.0, 0.0)
    ended: str = "failed"
    untrained: str = ""


@dataclass
class Arm:
    """One run under one mode, ``always`` or ``between_steps``, and what is done ``when_batch_waits``: its requests, and
    when steps were computed and weights transferred, from and to."""

    mode: ServingMode
    when_batch_waits: str
    samples: list[Sample] = field(default_factory=list[Sample])
    computed: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    transferred: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    steps: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.when_batch_waits}"

    def stalls(self) -> list[tuple[float, float]]:
        """Of each transfer that fell into a live answer: the longest time without a chunk around it, and its own."""
        found: list[tuple[float, float]] = []
        for begin, end in self.transferred:
            around = [sample.gap for sample in self.samples if sample.live and _overlap(sample.gap, (begin, end))]
            if around:
                found.append((max(later - earlier for earlier, later in around), end - begin))
        return found


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


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
                tasks.create_task(_ask(http, urls["gateway"], sample, number, options, began))
                number += 1
                # the time of a request does not depend on how long the ones before took
                await asyncio.wait({watching}, timeout=max(0.0, began + number / options.rate - time.monotonic()))


async def _ask(
    http: httpx.AsyncClient,
    gateway: str,
    sample: Sample,
    number: int,
    options: argparse.Namespace,
    load_began: float,
) -> None:
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
                if chunks and now - last > sample.gap[1] - sample.gap[0]:
                    sample.gap = (last - load_began, now - load_began)
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


@contextmanager
def _up(arm: Arm, options: argparse.Namespace, folder: Path) -> Generator[dict[str, str]]:
    """:func:`benchmarks.processes.up` as ``arm`` is to run."""
    job = {
        "model": str(options.model),
        "batch_size": GROUPS,
        "num_repeat": ANSWERS,
        "max_prompt_length": 256,
        "max_response_length": options.tokens,
        "lr": 1e-6,
        "serving": arm.mode,
    }
    gateway = {"claim_wait_seconds": ANSWER_SECONDS, "when_batch_waits": arm.when_batch_waits}
    with up(folder, job, gateway, HOOKS) as urls:
        yield urls


# ---------------------------------------------------------------------- report


def summary(arms: list[Arm]) -> dict[str, Any]:
    """The figures of all runs of one kind; latencies in seconds."""
    busy = [one for arm in arms for one in arm.samples if _within(arm.computed, one.sent)]
    idle = [one for arm in arms for one in arm.samples if not _within(arm.computed, one.sent)]
    everything = busy + idle
    hourly = [arm.steps / arm.seconds * 3600 for arm in arms]
    stalls = [stall for arm in arms for stall in arm.stalls()]
    return {
        "requests": len(everything),
        "ended": dict(Counter(one.ended for one in everything)),
        "untrained": dict(Counter(one.untrained for one in everything if one.untrained)),
        "latency": _quantiles(everything),
        "latency_while_a_step_is_computed": _quantiles(busy),
        "latency_while_none_is": _quantiles(idle),
        "syncs_under_live_answers": len(stalls),
        "stall": _spread([stall for stall, _ in stalls]),
        "transfer": _spread([transfer for _, transfer in stalls]),
        "stall_beyond_transfer": _spread([stall - transfer for stall, transfer in stalls]),
        "steps": [arm.steps for arm in arms],
        "steps_per_hour": statistics.median(hourly),
    }


def _within(spans: list[tuple[float, float]], moment: float) -> bool:
    return any(begin <= moment < end for begin, end in spans)


def _spread(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "most": max(seconds)} if seconds else {}


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
        axis.set_title(arm.name, fontsize="medium")
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
    parser.add_argument("--when-batch-waits", choices=get_args(WhenBatchWaits), nargs="+", default=["best"])
    parser.add_argument("--json", type=Path, help="write the report, with all samples, there")
    parser.add_argument("--plot", type=Path, help="draw all latencies there")


def run(options: argparse.Namespace) -> None:
    arms: list[Arm] = []
    with tempfile.TemporaryDirectory() as place:
        if options.model is None:
            from tests.engine import tiny_model

            options.model = tiny_model.build(Path(place) / "tiny")
        for number in range(options.rounds):
            for mode, waits in itertools.product(options.only, options.when_batch_waits):
                arms.append(arm := Arm(mode, waits))
                print(f"round {number + 1}: {arm.name}", file=sys.stderr, flush=True)
                with _up(arm, options, Path(place) / f"{number}-{mode}-{waits}") as urls:
                    asyncio.run(load(urls, options, arm))
    names = list(dict.fromkeys(arm.name for arm in arms))
    kinds = {name: summary([arm for arm in arms if arm.name == name]) for name in names}
    report: dict[str, Any] = {
        "model": str(options.model),
        "rate": options.rate,
        "tokens": options.tokens,
        "load": os.getloadavg()[0],
        "kinds": kinds,
        # of the first kind to each other one
        "ratios": {
            name: {
                "steps_per_hour": kinds[names[0]]["steps_per_hour"] / kinds[name]["steps_per_hour"],
                "p50": kinds[names[0]]["latency"]["p50"] / kinds[name]["latency"]["p50"],
            }
            for name in names[1:]
            # where nobody was served there is nothing to compare
            if "p50" in kinds[names[0]]["latency"] and "p50" in kinds[name]["latency"] and kinds[name]["steps_per_hour"]
        },
    }
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report | {"runs": [asdict(arm) for arm in arms]}) + "\n")
    if options.plot is not None:
        plot(arms, options.plot)
