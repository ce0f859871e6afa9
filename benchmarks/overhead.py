"""What the gateway adds to a request: direct upstream, a bare Starlette proxy, and the gateway with N=1 and N=8.

All in one run on one machine, each server a process of its own; the upstream is scripted and answers after a fixed
time. Prints JSON: median and 99th percentile in milliseconds, requests per second, and ratios to the bare proxy.
N=1 is below the job's group size, so its episode is sampled and given back instead of ended. Compare figures of one run
only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from swarm.http.serve import bind, run_app
from tests.gateway.stand_in import Swarm, completion

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
HOOK = "def on_compute_relative_reward(task, candidates, context):\n    return [0.5] * len(candidates)\n"


def serve_upstream(port: int, num_repeat: int, delay: float) -> None:
    """The scripted swarm server; ``/v1/chat/completions`` answers directly, like vLLM."""
    swarm = Swarm(num_repeat=num_repeat)
    swarm.url = f"http://127.0.0.1:{port}"

    async def answer(body: dict[str, Any], number: int) -> Response:
        await asyncio.sleep(delay)
        return JSONResponse(completion("a fixed answer of six words"))

    async def direct(request: Request) -> Response:
        return await answer(await request.json(), 0)

    swarm.answer = answer
    swarm.app.router.routes.append(Route("/v1/chat/completions", direct, methods=["POST"]))
    run_app(swarm.app, bind("127.0.0.1", port))


def serve_proxy(port: int, upstream: str) -> None:
    """The least a proxy can do: read, forward over a pooled client, answer."""
    http = httpx.AsyncClient(base_url=upstream, timeout=60, trust_env=False)

    async def forward(request: Request) -> Response:
        answer = await http.post("/v1/chat/completions", content=await request.body())
        return Response(answer.content, answer.status_code, media_type="application/json")

    run_app(Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])]), bind("127.0.0.1", port))


def serve_gateway(port: int, upstream: str, hooks: str, num_repeat: int) -> None:
    from gateway.config import GatewayConfig
    from gateway.serve import serve

    serve(GatewayConfig(port=port, swarm_url=upstream, hooks=hooks, num_repeat=num_repeat))


async def measure(url: str, concurrency: int, seconds: float) -> dict[str, float]:
    """Latencies in milliseconds and requests per second of closed-loop callers."""
    latencies: list[float] = []
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as http:
        await wait_until_up(http.get)
        for _ in range(20):
            (await http.post("/v1/chat/completions", json=BODY)).raise_for_status()
        started = time.perf_counter()

        async def caller() -> None:
            while (asked := time.perf_counter()) - started < seconds:
                (await http.post("/v1/chat/completions", json=BODY)).raise_for_status()
                latencies.append((time.perf_counter() - asked) * 1000)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(caller())
        elapsed = time.perf_counter() - started
    return {
        "p50_ms": round(statistics.median(latencies), 2),
        "p99_ms": round(statistics.quantiles(latencies, n=100)[98], 2),
        "rps": round(len(latencies) / elapsed, 1),
    }


async def wait_until_up(get: Callable[[str], Awaitable[httpx.Response]]) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await get("/health")
                return
            except httpx.TransportError:
                await asyncio.sleep(0.05)


def free_port() -> int:
    with bind("127.0.0.1", 0) as sock:
        return sock.getsockname()[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5.0, help="per measurement")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="time the scripted upstream takes to answer")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])


def run(options: argparse.Namespace) -> None:
    spawn = multiprocessing.get_context("spawn")
    ports = {name: free_port() for name in ("upstream", "proxy", "gateway_n1", "gateway_n8")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "on_compute_relative_reward.py").write_text(HOOK)
        delay = options.delay_ms / 1000
        processes = [
            spawn.Process(target=serve_upstream, args=(ports["upstream"], 8, delay), daemon=True),
            spawn.Process(target=serve_proxy, args=(ports["proxy"], urls["upstream"]), daemon=True),
            spawn.Process(target=serve_gateway, args=(ports["gateway_n1"], urls["upstream"], folder, 1), daemon=True),
            spawn.Process(target=serve_gateway, args=(ports["gateway_n8"], urls["upstream"], folder, 8), daemon=True),
        ]
        for process in processes:
            process.start()
        try:
            report: dict[str, Any] = {}
            for concurrency in options.concurrency:
                row = {
                    name: asyncio.run(measure(urls[name], concurrency, options.seconds))
                    for name in ("upstream", "proxy", "gateway_n1", "gateway_n8")
                }
                bare = row["proxy"]["rps"]
                row["rps_ratio_to_proxy"] = {n: round(row[n]["rps"] / bare, 3) for n in ("gateway_n1", "gateway_n8")}
                report[f"concurrency_{concurrency}"] = row
            print(json.dumps({"delay_ms": options.delay_ms, "seconds": options.seconds, **report}, indent=2))
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(timeout=20)
