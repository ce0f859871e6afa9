"""Hundreds of clients on several servers for minutes: no error, flat memory, no growth of file descriptors.

``python -m benchmarks soak``: four swarm server processes, each with a stand-in engine that trains whatever batches
come, and 500 clients in one load process, each with one of the servers for the whole run: claim (long-polled), one
200-token LLM call, end, a short pause, again. The warm-up comes first: for a quarter of its time the same clients claim
and end eval episodes as fast as they can, which fills what a server remembers of the past up to its bounds, and for the
rest they do what is measured, until memory has found its level. After it, without a pause (an idle server is a smaller
one), the resident and the proportional memory and the number of file descriptors of every server are sampled each
second.

``memory_drift_percent`` compares the mean of the last tenth of the samples with that of the first tenth,
``memory_swing_percent`` is the largest distance of any sample from the mean of all; memory is flat where both are
within 5 %. ``fd_growth`` compares the medians of the last and the first tenth. Any answer that is not the expected one
is an error; the first few are quoted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lifecycle import GROUP, Client, connected, percentiles
from benchmarks.processes import Running, running, start_engine, swarm_server
from benchmarks.vllm import MODEL
from swarm.http.serve import loop_factory
from swarm.job import TrainJob

QUOTED_ERRORS = 10
#: beyond it, in drift or swing, memory is not flat
MAX_PERCENT = 5.0


@dataclass
class Samples:
    """What one server process used, by the second; memory in MiB."""

    seconds: list[float] = field(default_factory=list[float])
    rss: list[float] = field(default_factory=list[float])
    pss: list[float] = field(default_factory=list[float])
    fds: list[int] = field(default_factory=list[int])

    def take(self, process: psutil.Process, now: float) -> None:
        full = process.memory_full_info()
        self.seconds.append(round(now, 2))
        self.rss.append(round(full.rss / 2**20, 2))
        self.pss.append(round(full.pss / 2**20, 2))
        self.fds.append(process.num_fds())

    def summary(self) -> dict[str, float]:
        first, last = tenths(self.rss)
        mean = statistics.fmean(self.rss)
        first_fds, last_fds = tenths(self.fds)
        return {
            "rss_mib_first": round(statistics.fmean(first), 1),
            "rss_mib_last": round(statistics.fmean(last), 1),
            "pss_mib_last": round(statistics.fmean(tenths(self.pss)[1]), 1),
            "memory_drift_percent": round((statistics.fmean(last) / statistics.fmean(first) - 1) * 100, 2),
            "memory_swing_percent": round(max(abs(value / mean - 1) for value in self.rss) * 100, 2),
            "fd_growth": statistics.median(last_fds) - statistics.median(first_fds),
            "fds_max": max(self.fds),
        }


def tenths(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The first and the last tenth of ``values``, at least one each."""
    count = max(1, len(values) // 10)
    return values[:count], values[-count:]


class Soak:
    """The clients of one run and what became of their requests."""

    def __init__(self, servers: list[Running], pause: float) -> None:
        self._servers = servers
        self._pause = pause
        self.errors: Counter[str] = Counter()
        self.lifecycles = 0

    async def fill(self, clients: list[Client], seconds: float) -> None:
        """Claim and end eval episodes."""

        async def act(client: Client) -> None:
            await client.end(await client.claim("eval"), "warm-up")

        await self._for(clients, seconds, act, pause=0.0)

    async def run(self, clients: list[Client], seconds: float) -> None:
        """What is measured."""

        async def act(client: Client) -> None:
            episode = await client.claim("train")
            await client.chat(episode)
            # the group that is next to be complete on this server takes it
            await client.end(episode, f"task-{self.lifecycles // (GROUP * len(self._servers))}")

        await self._for(clients, seconds, act, self._pause)

    def begin(self, clients: list[Client]) -> None:
        """What was before is not counted; errors always are."""
        self.lifecycles = 0
        for client in clients:
            client.timings.clear()

    async def _for(self, clients: list[Client], seconds: float, act: Any, pause: float) -> None:
        end = time.monotonic() + seconds

        async def go(client: Client) -> None:
            while time.monotonic() < end:
                try:
                    await act(client)
                    self.lifecycles += 1
                except (RuntimeError, OSError, ValueError) as exc:
                    self.errors[str(exc)[:300]] += 1
                    # a server that refuses everything must not be asked a million times
                    await asyncio.sleep(1.0)
                if pause:
                    await asyncio.sleep(pause * random.uniform(0.5, 1.5))

        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(go(client))


async def sample(processes: list[psutil.Process], into: list[Samples]) -> None:
    """Take a sample of every process each second; never returns."""
    started = time.monotonic()
    while True:
        for process, samples in zip(processes, into, strict=True):
            await asyncio.to_thread(samples.take, process, time.monotonic() - started)
        await asyncio.sleep(1.0)


async def measure(servers: list[Running], options: argparse.Namespace) -> tuple[dict[str, Any], list[Samples]]:
    job = TrainJob(
        model=MODEL, batch_size=32, num_repeat=GROUP, max_parallel_episodes=max(512, options.clients), max_staleness=1
    )
    for server in servers:
        await start_engine(server, job)
    shares = [options.clients // len(servers) + (n < options.clients % len(servers)) for n in range(len(servers))]
    groups = [await connected(server, share) for server, share in zip(servers, shares, strict=True)]
    clients = [client for group in groups for client in group]
    soak = Soak(servers, options.pause)
    await soak.fill(clients, options.warmup / 4)
    samples = [Samples() for _ in servers]
    async with asyncio.TaskGroup() as group:
        warming = options.warmup * 3 / 4
        group.create_task(soak.run(clients, warming + options.seconds))
        await asyncio.sleep(warming)
        soak.begin(clients)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(options.seconds):
                await sample([psutil.Process(server.pid) for server in servers], samples)
    for client in clients:
        client.connection.close()
    rows = [one.summary() for one in samples]
    latencies: dict[str, float] = {}
    for kind in ("claim", "chat", "end"):
        latencies |= percentiles(kind, [latency for client in clients for latency in client.timings[kind]])
    report: dict[str, Any] = {
        "clients": options.clients,
        "seconds": options.seconds,
        "lifecycles": soak.lifecycles,
        "errors": soak.errors.total(),
        "errors_quoted": dict(soak.errors.most_common(QUOTED_ERRORS)),
        **latencies,
        "servers": rows,
        "flat": all(max(abs(row["memory_drift_percent"]), row["memory_swing_percent"]) <= MAX_PERCENT for row in rows),
        "fd_growth": max(row["fd_growth"] for row in rows),
    }
    return report, samples


def plot(samples: list[Samples], path: Path) -> None:
    """Memory and file descriptors of every server over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, fds) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6), layout="constrained")
    for number, one in enumerate(samples, 1):
        memory.plot(one.seconds, one.rss, label=f"server {number}")
        fds.plot(one.seconds, one.fds, label=f"server {number}")
    memory.set_ylabel("resident memory, MiB")
    memory.set_ylim(bottom=0)
    memory.legend(ncols=len(samples), loc="lower right")
    fds.set_ylabel("file descriptors")
    fds.set_ylim(bottom=0)
    fds.set_xlabel("seconds after the warm-up")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0, help="after the warm-up")
    parser.add_argument("--warmup", type=float, default=240.0, help="seconds")
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds between two episodes of a client")
    parser.add_argument("--json", type=Path, help="write the report, with all samples, there")
    parser.add_argument("--plot", type=Path, help="write a picture (.png, .svg) of memory and descriptors there")


def run(options: argparse.Namespace) -> None:
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(options.servers)]
        servers = [stack.enter_context(running(swarm_server, folder)) for folder in folders]
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            report, samples = runner.run(measure(servers, options))
    print(json.dumps(report, indent=2))
    if options.json is not None:
        report["samples"] = [vars(one) for one in samples]
        options.json.write_text(json.dumps(report) + "\n")
    if options.plot is not None:
        plot(samples, options.plot)
    if report["errors"] or not report["flat"]:
        sys.exit("the soak failed: see errors and memory_drift_percent")
