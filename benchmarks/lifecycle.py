"""Durable lifecycles per second: claim -> end of episodes, each acknowledged after an fsync, and the latency of both.

``python -m benchmarks lifecycle``: one swarm server process (the command line's server with a stand-in engine), one
load process with 64 clients on keep-alive connections, each waiting for its answer before it asks again. Every claim
and end carries an idempotency key. In the same run:

* ``plain_dict``: the same requests to a bare Starlette app over the same uvicorn, event loop and HTTP parser that keeps
  its episodes in a dict: no validation, no keys, no durability. ``ratio_to_plain_dict`` divides by this upper bound.
* ``claim_end`` (the headline): train episodes with a recorded 200-token LLM call each. All are claimed, then each makes
  its call, then all are ended; claims and ends are timed, the calls between are not. What an end puts on disk is the
  whole trajectory.
* ``claim_end_eval``: eval episodes, claimed and ended at once by each client, in a closed loop.
* ``with_call``: train episodes, claim -> call -> end in a closed loop, all of it timed; batches are trained meanwhile.
* ``groups``: groups of 8 by ``claim_group`` and ``end_group``, in a closed loop (eval, so without calls); a lifecycle
  is an episode, and the latencies are of the group's requests.

Times are milliseconds. ``server_cpu_us`` is the CPU time of the server process per lifecycle, which depends little on
what else the machine does, and ``cpu_ratio_to_plain_dict`` divides it by that of the dict; ``load_cpu_us`` is the same
of the load process, which takes it from the same cores. Compare figures of one run only; ``--rounds`` repeats all of
it, and prints medians, and the least and the most of ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import Running, dict_server, running, start_engine, swarm_server
from benchmarks.rounds import summary
from benchmarks.vllm import MODEL
from benchmarks.wire import Connection, post
from swarm.http.serve import loop_factory
from swarm.job import TrainJob

GROUP = 8
CHAT = b'{"messages": [{"role": "user", "content": "hello"}]}'
WAIT_SECONDS = 30


@dataclass
class Client:
    """One client on its connection; ``timings`` are the latencies in seconds by kind of request."""

    connection: Connection
    number: int
    timings: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    uuid: str = field(default_factory=lambda: uuid.uuid4().hex)
    _keys: itertools.count[int] = field(default_factory=itertools.count)

    async def claim(self, episode_type: str) -> dict[str, Any]:
        return await self._timed(
            "claim",
            "/claim_episode",
            f'{{"client_uuid":"{self.uuid}","episode_type":"{episode_type}","discard_episode_timeout":600,'
            f'"wait_seconds":{WAIT_SECONDS},"idempotency_key":"c{next(self._keys)}"}}',
        )

    async def claim_group(self, count: int) -> list[dict[str, Any]]:
        answer = await self._timed(
            "claim",
            "/claim_group",
            f'{{"client_uuid":"{self.uuid}","episode_type":"eval","discard_episode_timeout":600,"count":{count},'
            f'"wait_seconds":{WAIT_SECONDS},"idempotency_key":"c{next(self._keys)}"}}',
        )
        return answer["episodes"]

    async def chat(self, episode: dict[str, Any]) -> None:
        path = f"/episodes/{episode['episode_uuid']}/v1/chat/completions"
        started = time.perf_counter()
        status, body = await self.connection.ask(post(path, CHAT, key=episode["openai_api_key"]))
        self.timings["chat"].append(time.perf_counter() - started)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {body.decode(errors='replace')[:500]}")

    async def end(self, episode: dict[str, Any], task: str) -> None:
        answer = await self._timed(
            "end",
            "/end_episode",
            f'{{"client_uuid":"{self.uuid}","episode_uuid":"{episode["episode_uuid"]}","task_id":"{task}",'
            f'"workflow_output":{{"reward":0.5}},"idempotency_key":"e{next(self._keys)}"}}',
        )
        if answer["error"]:
            raise RuntimeError(f"an end was not counted: {answer}")

    async def end_group(self, episodes: list[dict[str, Any]], task: str) -> None:
        ends = ",".join(
            f'{{"episode_uuid":"{e["episode_uuid"]}","workflow_output":{{"reward":0.5}}}}' for e in episodes
        )
        await self._timed(
            "end",
            "/end_group",
            f'{{"client_uuid":"{self.uuid}","task_id":"{task}","ends":[{ends}],'
            f'"idempotency_key":"e{next(self._keys)}"}}',
        )

    async def _timed(self, kind: str, path: str, body: str) -> dict[str, Any]:
        request = post(path, body.encode())
        started = time.perf_counter()
        status, content = await self.connection.ask(request)
        self.timings[kind].append(time.perf_counter() - started)
        answer = json.loads(content)
        if status != 200 or not answer["success"]:
            raise RuntimeError(f"{path}: {status} {content.decode(errors='replace')[:500]}")
        return answer


Work = Callable[[Client, int], Awaitable[None]]


@dataclass(frozen=True)
class Spent:
    """Seconds: on the clock, and of CPU time in the server and in this process."""

    clock: float
    server: float
    load: float

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.clock + other.clock, self.server + other.server, self.load + other.load)


async def together(server: Running, works: Iterable[Awaitable[None]]) -> Spent:
    """All ``works`` at once, and what that took."""

    async def run(work: Awaitable[None]) -> None:
        await work

    process = psutil.Process(server.pid)
    cpu, ours, started = cpu_seconds(process), time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(run(work))
    return Spent(time.perf_counter() - started, cpu_seconds(process) - cpu, time.process_time() - ours)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def shared(clients: list[Client], work: Work, count: int) -> list[Awaitable[None]]:
    """``work`` by all clients, ``count`` times in all."""
    numbers = iter(range(count))

    async def go(client: Client) -> None:
        for number in numbers:
            await work(client, number)

    return [go(client) for client in clients]


async def connected(server: Running, count: int) -> list[Client]:
    return [Client(await server.connect(), number) for number in range(count)]


def figures(clients: list[Client], lifecycles: int, spent: Spent) -> dict[str, float]:
    row: dict[str, float] = {
        "lifecycles": lifecycles,
        "per_second": round(lifecycles / spent.clock, 1),
        "server_cpu_us": round(spent.server / lifecycles * 1e6, 1),
        "load_cpu_us": round(spent.load / lifecycles * 1e6, 1),
    }
    for kind in ("claim", "chat", "end"):
        row |= percentiles(kind, [latency for client in clients for latency in client.timings[kind]])
    return row


def percentiles(kind: str, latencies: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum of ``latencies`` (seconds), in milliseconds; nothing of too few."""
    if len(latencies) < 2:
        return {}
    quantiles = statistics.quantiles(latencies, n=100, method="inclusive")
    named = {"p50": quantiles[49], "p99": quantiles[98], "max": max(latencies)}
    return {f"{kind}_{name}_ms": round(value * 1000, 2) for name, value in named.items()}


async def closed_loop(server: Running, clients: int, work: Work, count: int, each: int = 1) -> dict[str, float]:
    """``count`` lifecycles, of which ``work`` does ``each`` at a time, after a tenth as many to warm up."""
    workers = await connected(server, clients)
    await together(server, shared(workers, work, max(clients, count // each // 10)))
    for worker in workers:
        worker.timings.clear()
    spent = await together(server, shared(workers, work, count // each))
    for worker in workers:
        worker.connection.close()
    return figures(workers, count // each * each, spent)


async def eval_episode(client: Client, number: int) -> None:
    await client.end(await client.claim("eval"), f"task-{number // GROUP}")


async def eval_group(client: Client, number: int) -> None:
    await client.end_group(await client.claim_group(GROUP), f"task-{number}")


async def trained_episode(client: Client, number: int) -> None:
    episode = await client.claim("train")
    await client.chat(episode)
    await client.end(episode, f"task-{number // GROUP}")


async def phases(server: Running, clients: int, count: int) -> dict[str, float]:
    """``count`` train episodes: all are claimed, then each makes its call, then all are ended; see the module."""
    workers = await connected(server, clients)
    mine: dict[str, list[dict[str, Any]]] = {worker.uuid: [] for worker in workers}

    async def claim(client: Client, number: int) -> None:
        mine[client.uuid].append(await client.claim("train"))

    async def chat(client: Client) -> None:
        for episode in mine[client.uuid]:
            await client.chat(episode)

    async def end(client: Client) -> None:
        for number, episode in enumerate(mine[client.uuid]):
            await client.end(episode, f"{client.uuid}-{number // GROUP}")

    claiming = await together(server, shared(workers, claim, count))
    await together(server, map(chat, workers))
    for worker in workers:
        del worker.timings["chat"]
    ending = await together(server, map(end, workers))
    for worker in workers:
        worker.connection.close()
    rates = {"claims_per_second": round(count / claiming.clock, 1), "ends_per_second": round(count / ending.clock, 1)}
    return figures(workers, count, claiming + ending) | rates


async def measure(clients: int, count: int) -> dict[str, Any]:
    """All figures, each on a server of its own."""
    # neither a batch nor the bound on what waits gets in between: what is measured is the lifecycle
    unbatched = TrainJob(
        model=MODEL, batch_size=2 * count // GROUP + clients, num_repeat=GROUP, max_cached_episodes=4 * count + clients
    )
    batched = TrainJob(model=MODEL, batch_size=32, num_repeat=GROUP)
    rows: dict[str, Any] = {}
    with running(dict_server) as server:
        rows["plain_dict"] = await closed_loop(server, clients, eval_episode, count)
    with rolling(unbatched) as start:
        rows["claim_end"] = await phases(await start(), clients, count)
    with rolling(unbatched) as start:
        rows["claim_end_eval"] = await closed_loop(await start(), clients, eval_episode, count)
    with rolling(unbatched) as start:
        rows["groups"] = await closed_loop(await start(), clients, eval_group, count, GROUP)
    with rolling(batched) as start:
        rows["with_call"] = await closed_loop(await start(), clients, trained_episode, count // 4)
    bare = rows["plain_dict"]
    for name in rows.keys() - {"plain_dict"}:
        for figure, ratio in (("per_second", "ratio_to_plain_dict"), ("server_cpu_us", "cpu_ratio_to_plain_dict")):
            rows[name][ratio] = round(rows[name][figure] / bare[figure], 3)
    return rows


@contextlib.contextmanager
def rolling(job: TrainJob) -> Generator[Callable[[], Awaitable[Running]]]:
    """A swarm server with an empty journal; await what is given to start its engine with ``job``."""
    with tempfile.TemporaryDirectory() as folder, running(swarm_server, folder) as server:

        async def start() -> Running:
            await start_engine(server, job)
            return server

        yield start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--lifecycles", type=int, default=20_000, help="per figure; a quarter of it with calls")
    parser.add_argument("--rounds", type=int, default=1, help="as often as all is measured; prints medians")
    parser.add_argument("--json", type=Path, help="write the report there too")


def run(options: argparse.Namespace) -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        rounds = [runner.run(measure(options.clients, options.lifecycles)) for _ in range(options.rounds)]
    about = {"clients": options.clients, "cores": len(os.sched_getaffinity(0)), "rounds": options.rounds}
    report = {**about, **summary(rounds)}
    text = json.dumps(report, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
