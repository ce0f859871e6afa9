"""What a gateway adds to a request: ours, a bare proxy, LiteLLM's proxy and a native gateway, side by side in one run.

``python -m benchmarks overhead``: one scripted vLLM (answers of 200 tokens after ``--delay-ms``) and in front of it,
each alone at its time:

* ``direct``: nothing;
* ``proxy``: Starlette and httpx, read, forward, answer;
* ``ours_n1``: our gateway with one answer per request, which goes straight through the swarm server, as a group of one
  teaches nothing;
* ``ours_n8``: our gateway with groups of eight: claimed, sampled in one call, scored, ended with fsync (``best``);
* ``ours_first``: the same with the first answer streamed live;
* ``litellm``, ``ferrogw``: see :mod:`benchmarks.peers`; left out with ``--no-peers``.

Ours run with a real swarm server, whose engine is the same scripted vLLM. For each: plain requests in a closed loop of
1, 2, 4 ... callers (median, p99, requests per second), the highest rate whose p99 is within 20 ms, the time to the
first token of a stream, and the resident memory afterwards. Added times are differences of medians (p99s) to
``direct``. Servers and callers share the machine's cores, so compare figures of one run only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks import peers
from benchmarks.processes import Running, running, start_engine, swarm_server
from benchmarks.vllm import MODEL, ChatServer
from benchmarks.wire import Connection, Stream, address_of, post
from swarm.http.serve import loop_factory
from swarm.job import TrainJob

PATH = "/v1/chat/completions"
HOOK = "def on_compute_relative_reward(task, candidates, context):\n    return [0.1 * c.index for c in candidates]\n"
GROUP = 8
#: The issue's bound on the 99th percentile, for the highest rate.
P99_MS = 20.0
_WARM_UP = 50


def serve_vllm(delay: float, announce: Callable[[str], None]) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(ChatServer, "127.0.0.1", 0)
        announce(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await server.serve_forever()

    ChatServer.delay = delay
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())


def serve_proxy(upstream: str, announce: Callable[[str], None]) -> None:
    """The least a proxy can do: read, forward over a pooled client, answer; streams part by part."""
    import httpx
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    from swarm.http.serve import bind, run_app

    http = httpx.AsyncClient(base_url=upstream, timeout=60, trust_env=False)

    async def forward(request: Request) -> Response:
        body = await request.body()
        if b'"stream": true' not in body:
            answer = await http.post(PATH, content=body)
            return Response(answer.content, answer.status_code, media_type="application/json")
        streamed = await http.send(http.build_request("POST", PATH, content=body), stream=True)
        return StreamingResponse(streamed.aiter_bytes(), media_type="text/event-stream")

    sock = bind("127.0.0.1", 0)
    announce(f"http://127.0.0.1:{sock.getsockname()[1]}")
    run_app(Starlette(routes=[Route(PATH, forward, methods=["POST"])]), sock)


def serve_gateway(settings: dict[str, Any], announce: Callable[[str], None]) -> None:
    from gateway.config import GatewayConfig
    from gateway.serve import serve

    serve(GatewayConfig(port=0, **settings), on_bound=announce)


@contextlib.contextmanager
def ours(folder: Path, delay: float, **settings: Any) -> Generator[tuple[str, list[psutil.Process]]]:
    """Our gateway and a swarm server that never has enough for a batch: no weight sync gets in between."""
    job = TrainJob(model=MODEL, batch_size=100_000, num_repeat=GROUP)
    os.environ["STAND_IN_DELAY"] = str(delay)
    hooks = folder / "hooks"
    hooks.mkdir(exist_ok=True)
    (hooks / "on_compute_relative_reward.py").write_text(HOOK)
    with tempfile.TemporaryDirectory() as run_dir, running(swarm_server, run_dir) as swarm:
        asyncio.run(start_engine(swarm, job))
        settings = {"swarm_url": swarm.url, "hooks": str(hooks), **settings}
        with running(serve_gateway, settings) as gateway:
            yield gateway.url, [psutil.Process(gateway.pid)]


@contextlib.contextmanager
def alone(server: contextlib.AbstractContextManager[Running]) -> Generator[tuple[str, list[psutil.Process]]]:
    with server as started:
        yield started.url, [psutil.Process(started.pid)]


@contextlib.contextmanager
def peer(
    start: Callable[[int, str, Path], contextlib.AbstractContextManager[psutil.Process]], upstream: str, folder: Path
) -> Generator[tuple[str, list[psutil.Process]]]:
    from swarm.http.serve import bind

    with bind("127.0.0.1", 0) as sock:
        port: int = sock.getsockname()[1]
    with start(port, upstream, folder) as process:
        yield f"http://127.0.0.1:{port}", [process]


async def closed_loop(url: str, callers: int, seconds: float) -> dict[str, float]:
    """Median and p99 in milliseconds and the rate of ``callers`` that ask, each again as soon as it is answered."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
    request = post(PATH, json.dumps(body).encode())
    connections = [await Connection.open(*address_of(url)) for _ in range(callers)]
    latencies: list[float] = []
    started = time.perf_counter()

    async def ask_on(connection: Connection) -> None:
        while (asked := time.perf_counter()) - started < seconds:
            status, answer = await connection.ask(request)
            if status != 200:
                raise RuntimeError(f"{url}: {status} {answer[:500]!r}")
            latencies.append(time.perf_counter() - asked)

    async with asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(ask_on(connection))
    elapsed = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return {**percentiles(latencies), "rps": round(len(latencies) / elapsed, 1)}


async def first_token(url: str, count: int) -> dict[str, float]:
    """Milliseconds from sending a streamed request to its first chunk with content, one caller."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 200}
    request = post(PATH, json.dumps(body).encode())
    stream = await Stream.open(*address_of(url))
    latencies = [await stream.ask(request) for _ in range(count)]
    stream.close()
    return percentiles(latencies)


def percentiles(latencies: list[float]) -> dict[str, float]:
    quantiles = statistics.quantiles(latencies, n=100)
    return {"p50_ms": round(quantiles[49] * 1000, 2), "p99_ms": round(quantiles[98] * 1000, 2)}


async def measure(url: str, callers: list[int], seconds: float) -> dict[str, Any]:
    await first_token(url, _WARM_UP)
    await closed_loop(url, 4, min(1.0, seconds))
    loops = {str(count): await closed_loop(url, count, seconds) for count in callers}
    within = [row["rps"] for row in loops.values() if row["p99_ms"] <= P99_MS]
    return {
        "callers": loops,
        "rps_within_p99": max(within, default=None),
        "first_token": await first_token(url, max(100, int(40 * seconds))),
    }


def memory(processes: list[psutil.Process]) -> float:
    """Resident memory of the processes and their children, in MiB."""
    family = [one for process in processes for one in (process, *process.children(recursive=True))]
    return round(sum(one.memory_info().rss for one in family) / 2**20, 1)


def compare(rows: dict[str, dict[str, Any]]) -> None:
    """Write what each adds to ``direct``, and its rates as ratios to the bare proxy's and LiteLLM's, into its row."""
    direct = rows["direct"]
    for row in rows.values():
        row["added"] = {
            count: {name: round(loop[name] - direct["callers"][count][name], 2) for name in ("p50_ms", "p99_ms")}
            for count, loop in row["callers"].items()
        }
        row["added_first_token_ms"] = round(row["first_token"]["p50_ms"] - direct["first_token"]["p50_ms"], 2)
        for other in ("proxy", "litellm"):
            if other in rows:
                row[f"rps_ratio_to_{other}"] = {
                    count: round(loop["rps"] / rows[other]["callers"][count]["rps"], 2)
                    for count, loop in row["callers"].items()
                }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=4.0, help="per figure")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="time the scripted vLLM takes to its first token")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--no-peers", action="store_true", help="do not install and measure other gateways")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these and 'direct' only")
    parser.add_argument("--json", type=Path, help="write the report there too")


def run(options: argparse.Namespace) -> None:
    console = Console(stderr=True)
    if not options.no_peers:
        with console.status("installing the peers"):
            peers.install()
    delay = options.delay_ms / 1000
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name, running(serve_vllm, delay) as vllm:
        folder = Path(name)
        subjects: dict[str, Callable[[], contextlib.AbstractContextManager[tuple[str, list[psutil.Process]]]]] = {
            "direct": lambda: contextlib.nullcontext((vllm.url, [psutil.Process(vllm.pid)])),
            "proxy": lambda: alone(running(serve_proxy, vllm.url)),
            "ours_n1": lambda: ours(folder, delay, num_repeat=1),
            "ours_n8": lambda: ours(folder, delay),
            "ours_first": lambda: ours(folder, delay, policy="first"),
            "litellm": lambda: peer(peers.litellm, vllm.url, folder),
            "ferrogw": lambda: peer(peers.ferrogw, vllm.url, folder),
        }
        wanted = {"direct", *(options.only or subjects)} - ({"litellm", "ferrogw"} if options.no_peers else set())
        for name, start in subjects.items():
            if name not in wanted:
                continue
            with console.status(f"measuring {name}"), start() as (url, processes):
                with asyncio.Runner(loop_factory=loop_factory()) as runner:
                    rows[name] = runner.run(measure(url, options.callers, options.seconds))
                rows[name]["memory_mib"] = memory(processes)
    compare(rows)
    cores = len(os.sched_getaffinity(0))
    text = json.dumps({"cores": cores, "delay_ms": options.delay_ms, "seconds": options.seconds, **rows}, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
