"""What the resilience tests run: a swarm server, its engine and a gateway, each in a process of its own.

Invariant: whatever it starts is gone when it ends; :meth:`Rig.leaks` says what requests have left behind anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT
from benchmarks.wire import Connection, ask_json
from swarm.job import TrainJob, dump_job
from tests.gateway.conftest import write_hooks
from tests.gateway.resilience.watching import GatewayProcess, gateway_process
from tests.kill.harness import kill, kill_engine
from tests.kill.invariants import lines
from tests.ports import free_ports
from tests.standins import engine
from tests.standins.swarm import said, streamed
from tests.standins.upstream import CHAT, Upstream
from tests.standins.vllm import listening

#: Eight groups run at a time: of 16 users some wait for a claim.
JOB = TrainJob(model="stand-in", batch_size=4, num_repeat=2, max_parallel_episodes=16, max_staleness=5)
#: Of 16 users some wait for a place.
PLACES = 12
_START_SECONDS = 240.0
_SETTLE_SECONDS = 60.0

#: Judges by length; hangs where the user says so.
REWARD = """
import asyncio, time

async def on_compute_relative_reward(task, candidates, context):
    said = str(candidates[0].request)
    if "HANG" in said:
        await asyncio.sleep(3600)
    if "BLOCK" in said:
        await asyncio.to_thread(time.sleep, 2)
    return [len(candidate.text.split()) / 10 for candidate in candidates]
"""


def plain_upstream() -> Upstream:
    """An upstream that answers at once, plain or streamed."""
    upstream = Upstream()
    upstream.answers[CHAT] = lambda body: streamed("hi") if body.get("stream") else said("from the upstream")
    return upstream


@dataclass
class Rig:
    """Everything of one run; use :func:`running`."""

    folder: Path
    port: int
    plain: Upstream = field(default_factory=plain_upstream)
    _server: asyncio.subprocess.Process | None = None
    _gateway: GatewayProcess | None = None
    _resting_tasks: int = 0

    @property
    def gateway(self) -> GatewayProcess:
        """The one that serves."""
        assert self._gateway is not None
        return self._gateway

    def served_by(self, gateway: GatewayProcess) -> None:
        """Let ``gateway`` be the one, which may serve others too."""
        self._gateway = gateway

    @property
    def url(self) -> str:
        """Of the swarm server."""
        return f"http://127.0.0.1:{self.port}"

    # ------------------------------------------------------------------ the swarm server and its engine

    async def start_server(self) -> None:
        with (self.folder / "server.log").open("ab") as output:
            self._server = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.standins.server",
                *("paced", str(self.folder / "run"), str(self.port)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, engine.FOLDER_VARIABLE: str(self.folder), "PYTHONPATH": str(ROOT)},
            )
        assert self._server.stdout is not None
        async with asyncio.timeout(_START_SECONDS):
            url = (await self._server.stdout.readline()).decode().strip()
        assert url, f"the server did not start: {self._last('server.log')}"

    async def kill_server(self) -> None:
        assert self._server is not None
        await kill(self._server)

    def signal_engine(self, sent: signal.Signals) -> None:
        started = [line["started"] for line in self._engine_lines() if "started" in line]
        with contextlib.suppress(ProcessLookupError):
            os.kill(started[-1], sent)

    async def ask_server(self, path: str, body: Any = None) -> dict[str, Any]:
        """One request to the swarm server."""
        return await ask_here(self.port, path, body)

    async def rolling(self) -> None:
        """Wait until the engine rolls; start it where it is offline."""
        async with asyncio.timeout(_START_SECONDS):
            while True:
                with contextlib.suppress(OSError, RuntimeError):
                    status = await self.ask_server("/get_engine_status")
                    if status["engine_status"] == "ENGINE.ROLLING":
                        return
                    if status["engine_status"] == "ENGINE.OFFLINE":
                        await self.ask_server("/start_engine", {})
                await asyncio.sleep(0.05)

    async def offline(self) -> None:
        """Wait until the server knows that its engine is gone."""

        async def gone() -> bool:
            return (await self.ask_server("/get_engine_status"))["engine_status"] == "ENGINE.OFFLINE"

        await until_async(gone, _SETTLE_SECONDS, "the server does not notice that its engine is gone")

    @property
    def steps(self) -> int:
        """Weight syncs so far."""
        return sum("step" in line for line in self._engine_lines())

    async def stepped(self, steps: int, within: float) -> None:
        """Wait for the ``steps``-th weight sync."""
        await until(lambda: self.steps >= steps, within, f"only {self.steps} of {steps} weight syncs")

    async def upstream_counts(self) -> dict[str, Any]:
        """What the scripted vLLM says of its calls."""
        address = [line["address"] for line in self._engine_lines() if "started" in line][-1]
        return await ask_here(int(address.rpartition(":")[2]), "/counts")

    def calls(self) -> list[dict[str, Any]]:
        """Every call that has reached a scripted vLLM and ended; see :class:`tests.standins.engine.Paced`."""
        path = self.folder / "calls.jsonl"
        return lines(path) if path.exists() else []

    def _engine_lines(self) -> list[dict[str, Any]]:
        path = self.folder / "engine.jsonl"
        return lines(path) if path.exists() else []

    def _last(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")[-3000:]

    # ------------------------------------------------------------------ what is left

    async def leaks(self) -> dict[str, int]:
        """What is still held, once everything had time to end; all zero is well."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while any((found := await self._held()).values()):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.05)
        return found

    async def _held(self) -> dict[str, int]:
        held: dict[str, int] = (await ask_here(self.gateway.port, "/held"))["held"]
        return {**await self.under_way(), **held, "tasks": max(0, held["tasks"] - self._resting_tasks)}

    async def under_way(self) -> dict[str, int]:
        """What the swarm server and the scripted vLLM have to do for anybody."""
        status = await self.ask_server("/status?steps=0")
        return {
            "episodes": status["pool"]["running_episodes"],
            "claims": status["waiting_claims"],
            "upstream_requests": (await self.upstream_counts())["running"],
        }

    async def stats(self) -> dict[str, Any]:
        """What the gateway counted."""
        return (await ask_here(self.gateway.port, "/held"))["stats"]["default"]

    # ------------------------------------------------------------------ the gateway

    @contextlib.asynccontextmanager
    async def serving(self, *, upstream: bool, **settings: Any) -> AsyncGenerator[None]:
        """A gateway in front of the swarm server while the block runs, perhaps with the plain upstream behind it."""
        hooks = write_hooks(self.folder / "hooks", REWARD)
        async with contextlib.AsyncExitStack() as stack:
            if upstream:
                url = await stack.enter_async_context(listening(self.plain.app))
                settings["upstream"] = {"base_url": f"{url}/v1"}
            config = {
                "port": 0,
                "swarm_url": self.url,
                "hooks": str(hooks),
                "max_in_flight": PLACES,
                **settings,
            }
            self._gateway = await stack.enter_async_context(gateway_process(self.folder, config))
            # what rests while nobody asks: the first status of the swarm server has been read
            await ask_here(self.gateway.port, "/health")
            await until_async(self._without_background, 30, "the gateway does not come to rest")
            self._resting_tasks = (await ask_here(self.gateway.port, "/held"))["held"]["tasks"]
            yield

    @contextlib.asynccontextmanager
    async def shadowing(self) -> AsyncGenerator[None]:
        """The same with the plain upstream as the incumbent, in whose shadow a challenger learns."""
        async with listening(self.plain.app) as url:
            serve = {"incumbent": {"upstream": {"base_url": f"{url}/v1"}}}
            async with self.serving(upstream=False, hook_timeout_seconds=0.5, serve=serve):
                yield

    async def _without_background(self) -> bool:
        return not (await ask_here(self.gateway.port, "/held"))["held"]["background"]


@contextlib.asynccontextmanager
async def running(folder: Path, job: TrainJob = JOB) -> AsyncGenerator[Rig]:
    """A swarm server whose engine rolls; all of it is gone after the block."""
    [port] = free_ports(1)
    rig = Rig(folder, port)
    try:
        await rig.start_server()
        await rig.ask_server("/sync_train_config", {"yaml_as_string": dump_job(job)})
        await rig.rolling()
        yield rig
    finally:
        if rig._server is not None and rig._server.returncode is None:
            rig._server.terminate()
            try:
                async with asyncio.timeout(15):
                    await rig._server.wait()
            except TimeoutError:
                await rig.kill_server()
        for line in rig._engine_lines():
            if "started" in line:
                await asyncio.to_thread(kill_engine, line["started"])


async def until(condition: Callable[[], bool], within: float, otherwise: str) -> None:
    """Wait until ``condition`` holds; :class:`AssertionError` with ``otherwise`` after ``within`` seconds."""

    async def holds() -> bool:
        return condition()

    await until_async(holds, within, otherwise)


async def until_async(condition: Callable[[], Awaitable[bool]], within: float, otherwise: str) -> None:
    """The same for what has to be asked."""
    deadline = time.monotonic() + within
    while not await condition():
        assert time.monotonic() < deadline, f"{otherwise} within {within:g} s"
        await asyncio.sleep(0.02)


async def ask_here(port: int, path: str, body: Any = None) -> dict[str, Any]:
    """One request to a server of ours on this machine."""
    connection = await Connection.open("127.0.0.1", port)
    try:
        async with asyncio.timeout(30):
            return await ask_json(connection, path, body)
    finally:
        connection.close()
