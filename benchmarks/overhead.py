"""What a gateway adds to a request: ours, a bare proxy, LiteLLM's proxy and a native gateway, side by side in one run.

``python -m benchmarks overhead``: one scripted vLLM (answers of 200 tokens after ``--delay-ms``) and in front of it,
each alone at its time:

* ``direct``: nothing;
* ``direct_n8``: nothing either, asked for what the swarm server asks of vLLM itself: plain requests sample a group of
  eight with token ids and log-probabilities in one call, streams one answer of such a group;
* ``proxy``: Starlette and httpx, read, forward, answer;
* ``ours_n1``: our gateway with one answer per request, which goes straight through the swarm server, as a group of one
  teaches nothing;
* ``ours_n8``: our gateway with groups of eight: claimed, sampled in one call, scored, ended with fsync (``best``);
* ``ours_n8_acknowledged``: the same, the answer waits until its rewards are on disk (``acknowledge_seconds``);
* ``ours_first``: groups of eight with the first answer streamed live;
* ``ours_upstream``: our gateway with a plain upstream, the scripted vLLM, and nothing that trains;
* ``ours_shadow``: the same upstream as the incumbent, and groups of eight in its shadow; ``added_by_shadow_ms`` is
  beyond ``ours_upstream``;
* ``litellm``, ``ferrogw``: see :mod:`benchmarks.peers`; left out with ``--no-peers``.

Ours run with a real swarm server, whose engine is the same scripted vLLM. For each: plain requests in a closed loop of
1, 2, 4 ... callers (median, p99, requests per second), the highest rate whose p99 is within 20 ms, the time to the
first token of a stream (one caller, who pauses between streams), CPU time per request, and the resident memory
afterwards. Servers and callers share the machine's cores, so compare figures of one run only; CPU time per request says
most where other work runs beside. ``--rounds`` measures all of them in turn, and prints medians, and of ratios the
least and the most of a round too.

Added times are differences of medians (p99s) to ``direct``: of an application that asks for one answer and nothing of
how it was sampled. A group costs more than that however it is asked for, so two more figures say what ours add beyond
what nobody could do without. ``added_beyond_sample_and_hook_ms``, of the groups of eight: the time of a plain request
less that of the sampling call alone, ``direct_n8`` with as many callers, and less the hook's own time, ``hook_ms``,
which is that of its function called alone with eight such answers (what the gateway does to call it safely stays in the
difference). ``added_first_token_beyond_sample_ms``, of ``ours_first``: the same of the first token, against streams of
``direct_n8``.
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
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from adapters.dialects import SampledAnswer
from benchmarks import peers
from benchmarks.processes import Running, running, start_engine, swarm_server
from benchmarks.rounds import summary
from benchmarks.vllm import MODEL, TOKENS, ChatServer, completion
from benchmarks.wire import Caller, address_of, post
from reward_hooks import Candidate, HookContext, load_hooks
from swarm.http.serve import loop_factory
from swarm.job import TrainJob
from swarm.server.dataplane.requests import prepare
from swarm.types import Task

PATH = "/v1/chat/completions"
HOOK = "def on_compute_relative_reward(task, candidates, context):\n    return [0.1 * c.index for c in candidates]\n"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": TOKENS}
GROUP = 8
JOB = TrainJob(model=MODEL, batch_size=100_000, num_repeat=GROUP)
PEERS = frozenset({"litellm", "ferrogw"})
#: What answers with the best of a group.
BEST = frozenset({"ours_n8", "ours_n8_acknowledged"})
#: The issue's bound on the 99th percentile, for the highest rate.
P99_MS = 20.0
_WARM_UP = 30
#: Seconds between two streams, in which work that is left behind by the first is done; no user asks again at once.
_PAUSE = 0.05


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
    from gateway.app import serve
    from gateway.config.gateway import GatewayConfig

    serve(GatewayConfig(port=0, **settings), on_bound=announce)


@dataclass(frozen=True)
class Subject:
    """What is measured at ``url``.

    Attributes:
        processes: of the gateway itself; with their children.
        behind: of what it needs beside vLLM.
        model: the name to ask for.
        samples: it is vLLM, to be asked as the swarm server asks it.
    """

    url: str
    processes: list[psutil.Process]
    behind: list[psutil.Process] = field(default_factory=list[psutil.Process])
    model: str = MODEL
    samples: bool = False

    def body(self, *, stream: bool) -> dict[str, Any]:
        """The request."""
        body = BODY | {"model": self.model} | ({"stream": True} if stream else {})
        if not self.samples:
            return body
        return prepare(body, "train", JOB, self.model, None if stream else GROUP).body

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time so far, of the gateway and of what is behind it."""
        return sum(map(_cpu_of, family(self.processes))), sum(map(_cpu_of, self.behind))


def family(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for process in processes for one in (process, *process.children(recursive=True))]


def _cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextlib.contextmanager
def ours(folder: Path, delay: float, **settings: Any) -> Generator[Subject]:
    """Our gateway and a swarm server that never has enough for a batch: no weight sync gets in between."""
    os.environ["STAND_IN_DELAY"] = str(delay)
    hooks = write_hook(folder)
    with tempfile.TemporaryDirectory() as run_dir, running(swarm_server, run_dir) as swarm:
        asyncio.run(start_engine(swarm, JOB))
        settings = {"swarm_url": swarm.url, "hooks": str(hooks), **settings}
        with running(serve_gateway, settings) as gateway:
            yield Subject(gateway.url, [psutil.Process(gateway.pid)], [psutil.Process(swarm.pid)])


def write_hook(folder: Path) -> Path:
    """The folder of the hook."""
    hooks = folder / "hooks"
    hooks.mkdir(exist_ok=True)
    (hooks / "on_compute_relative_reward.py").write_text(HOOK)
    return hooks


def time_hook(folder: Path, times: int = 1000) -> float:
    """Milliseconds that the hook's function takes with a group of eight: the median, called alone."""
    hook = load_hooks(write_hook(folder)).reward
    answer = SampledAnswer.from_completion(json.loads(completion(1, False).partition(b"\r\n\r\n")[2]))
    group = [Candidate(index=place, message=answer.message, text=answer.text) for place in range(GROUP)]
    task, context = Task(task_id="hello"), HookContext(num_repeat=GROUP)
    seconds: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        hook(task, group, context)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1000


@contextlib.contextmanager
def alone(server: contextlib.AbstractContextManager[Running]) -> Generator[Subject]:
    with server as started:
        yield Subject(started.url, [psutil.Process(started.pid)])


@contextlib.contextmanager
def peer(
    start: Callable[[int, str, Path], contextlib.AbstractContextManager[psutil.Process]],
    upstream: str,
    folder: Path,
    model: str = MODEL,
) -> Generator[Subject]:
    from swarm.http.serve import bind

    with bind("127.0.0.1", 0) as sock:
        port: int = sock.getsockname()[1]
    with start(port, upstream, folder) as process:
        yield Subject(f"http://127.0.0.1:{port}", [process], model=model)


async def closed_loop(subject: Subject, callers: int, seconds: float) -> dict[str, float]:
    """Of ``callers`` that ask, each again as soon as it is answered: median and p99 in milliseconds, rate, CPU time in
    milliseconds per request (of the gateway, and of what is behind it)."""
    request = post(PATH, json.dumps(subject.body(stream=False)).encode())
    latencies: list[float] = []
    before, started = subject.cpu_seconds(), time.perf_counter()

    async def ask_on(caller: Caller) -> None:
        # a percentile takes two
        while len(latencies) < 2 or time.perf_counter() - started < seconds:
            reply = await caller.ask(request)
            if reply.status != 200:
                raise RuntimeError(f"{subject.url}: {reply.status} {reply.body[:500]!r}")
            latencies.append(reply.seconds)

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(_calling(subject, ask_on))
    elapsed = time.perf_counter() - started
    return {
        **percentiles(latencies),
        "rps": round(len(latencies) / elapsed, 1),
        **cpu_per_request(subject, before, len(latencies)),
    }


async def first_token(subject: Subject, count: int) -> dict[str, float]:
    """Milliseconds from sending a streamed request to its first chunk with content, one caller; CPU as above."""
    request = post(PATH, json.dumps(subject.body(stream=True)).encode())
    latencies: list[float] = []
    before = subject.cpu_seconds()

    async def ask_on(caller: Caller) -> None:
        for _ in range(count):
            reply = await caller.ask(request)
            if reply.status != 200 or reply.first_token is None:
                raise RuntimeError(f"{subject.url}: no stream of tokens: {reply.status} {reply.body[:500]!r}")
            latencies.append(reply.first_token)
            await asyncio.sleep(_PAUSE)

    await _calling(subject, ask_on)
    return {**percentiles(latencies), **cpu_per_request(subject, before, count)}


async def _calling(subject: Subject, ask_on: Callable[[Caller], Awaitable[None]]) -> None:
    caller = Caller(*address_of(subject.url))
    try:
        await ask_on(caller)
    finally:
        caller.close()


def cpu_per_request(subject: Subject, before: tuple[float, float], count: int) -> dict[str, float]:
    gateway, behind = (now - then for now, then in zip(subject.cpu_seconds(), before, strict=True))
    return {"cpu_ms": round(gateway / count * 1000, 3), "cpu_behind_ms": round(behind / count * 1000, 3)}


def percentiles(latencies: list[float]) -> dict[str, float]:
    quantiles = statistics.quantiles(latencies, n=100, method="inclusive")
    return {"p50_ms": round(quantiles[49] * 1000, 2), "p99_ms": round(quantiles[98] * 1000, 2)}


async def measure(subject: Subject, options: argparse.Namespace, advance: Callable[[], None]) -> dict[str, Any]:
    """All figures of one subject; ``advance`` is called after each of :func:`steps`."""
    seconds: float = options.seconds
    await first_token(subject, _WARM_UP)
    await closed_loop(subject, 4, min(1.0, seconds))
    advance()
    loops: dict[str, dict[str, float]] = {}
    for count in options.callers:
        loops[str(count)] = await closed_loop(subject, count, seconds)
        advance()
    within = [row["rps"] for row in loops.values() if row["p99_ms"] <= P99_MS]
    token = await first_token(subject, max(20, int(33 * seconds)))
    advance()
    memory = sum(one.memory_info().rss for one in family(subject.processes))
    return {
        "callers": loops,
        "rps_within_p99": max(within, default=None),
        "first_token": token,
        "memory_mib": round(memory / 2**20, 1),
    }


def steps(options: argparse.Namespace) -> int:
    """How many there are of one subject."""
    return len(options.callers) + 2


def compare(rows: dict[str, dict[str, Any]], hook_ms: float) -> None:
    """Write what each adds to ``direct``, and to ``direct_n8`` and the hook where it samples groups, and its rates and
    CPU time (of the gateway, and of what is behind it) as ratios to the bare proxy's and LiteLLM's, into its row."""
    rows = {name: row for name, row in rows.items() if "error" not in row}
    direct = rows["direct"]
    sampling = rows["direct_n8"]
    for name in BEST & rows.keys():
        rows[name]["hook_ms"] = round(hook_ms, 4)
        rows[name]["added_beyond_sample_and_hook_ms"] = _added(rows[name], sampling, hook_ms)
    if "ours_first" in rows:
        rows["ours_first"]["added_first_token_beyond_sample_ms"] = _added_first_token(rows["ours_first"], sampling)
    if {"ours_shadow", "ours_upstream"} <= rows.keys():
        rows["ours_shadow"]["added_by_shadow_ms"] = _added(rows["ours_shadow"], rows["ours_upstream"])
    for row in rows.values():
        row["added"] = _added(row, direct)
        row["added_first_token_ms"] = _added_first_token(row, direct)
        for other in ("proxy", "litellm"):
            if other in rows:
                for figure, beside in (("rps", "rps"), ("cpu_ms", "cpu_ms"), ("cpu_behind_ms", "cpu_ms")):
                    row[f"{figure}_ratio_to_{other}"] = {
                        count: round(loop[figure] / divisor, 2)
                        for count, loop in row["callers"].items()
                        # a clock of 10 ms sees nothing of a few requests
                        if (divisor := rows[other]["callers"][count][beside]) > 0
                    }


def _added(row: dict[str, Any], to: dict[str, Any], less: float = 0.0) -> dict[str, dict[str, float]]:
    return {
        count: {name: round(loop[name] - to["callers"][count][name] - less, 2) for name in ("p50_ms", "p99_ms")}
        for count, loop in row["callers"].items()
    }


def _added_first_token(row: dict[str, Any], to: dict[str, Any]) -> float:
    return round(row["first_token"]["p50_ms"] - to["first_token"]["p50_ms"], 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=3.0, help="per figure")
    parser.add_argument("--rounds", type=int, default=1, help="all subjects in turn, as often; prints medians")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="time the scripted vLLM takes to its first token")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--no-peers", action="store_true", help="do not install and measure other gateways")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these, 'direct' and 'direct_n8' only")
    parser.add_argument("--json", type=Path, help="write the report there too")


def run(options: argparse.Namespace) -> None:
    console = Console(stderr=True)
    if not options.no_peers:
        with console.status("installing the peers"):
            peers.install()
    delay = options.delay_ms / 1000
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as place, running(serve_vllm, delay) as vllm:
        folder, at = Path(place), {"base_url": f"{vllm.url}/v1"}
        plain = {"swarm_url": None, "upstream": at}
        subjects: dict[str, Callable[[], contextlib.AbstractContextManager[Subject]]] = {
            "direct": lambda: contextlib.nullcontext(Subject(vllm.url, [psutil.Process(vllm.pid)])),
            "direct_n8": lambda: contextlib.nullcontext(Subject(vllm.url, [psutil.Process(vllm.pid)], samples=True)),
            "proxy": lambda: alone(running(serve_proxy, vllm.url)),
            "ours_n1": lambda: ours(folder, delay, num_repeat=1),
            "ours_n8": lambda: ours(folder, delay),
            "ours_n8_acknowledged": lambda: ours(folder, delay, acknowledge_seconds=5),
            "ours_first": lambda: ours(folder, delay, policy="first"),
            "ours_upstream": lambda: alone(running(serve_gateway, plain)),
            "ours_shadow": lambda: ours(folder, delay, serve={"incumbent": {"upstream": at}}),
            "litellm": lambda: peer(peers.litellm, vllm.url, folder),
            "ferrogw": lambda: peer(peers.ferrogw, vllm.url, folder, peers.FERROGW_MODEL),
        }
        wanted = {"direct", "direct_n8", *(options.only or subjects)} - (PEERS if options.no_peers else set[str]())
        chosen = {name: start for name, start in subjects.items() if name in wanted}
        with progress(console) as bar:
            task = bar.add_task("", total=options.rounds * len(chosen) * steps(options))
            for _ in range(options.rounds):
                rows: dict[str, dict[str, Any]] = {}
                for name, start in chosen.items():
                    bar.update(task, description=name)
                    try:
                        with start() as subject, asyncio.Runner(loop_factory=loop_factory()) as runner:
                            rows[name] = runner.run(measure(subject, options, lambda: bar.advance(task)))
                    except (peers.PeerError, RuntimeError, ConnectionError, ExceptionGroup) as exc:
                        # a peer that does not answer is a finding about it, and no reason to lose the others' figures
                        if name not in PEERS:
                            raise
                        rows[name] = {"error": repr(exc)}
                        console.print(f"{name}: {exc!r}", style="yellow")
                compare(rows, time_hook(folder))
                rounds.append(rows)
    about = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    about |= {"delay_ms": options.delay_ms, "seconds": options.seconds, "rounds": options.rounds}
    text = json.dumps({**about, **summary(rounds)}, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


def progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>20}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), console=console
    )
