"""One run of the kill test: real processes, a proxy between them, and SIGKILL at seeded moments.

Invariant: whatever it starts is dead when it returns, and its folder then holds every witness that
:mod:`tests.kill.invariants` asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import ROOT
from benchmarks.wire import Connection, ask_json
from swarm.job import ServingMode, TrainJob, dump_job
from tests.kill.drivers import DRIVERS
from tests.kill.invariants import Witnesses, lines
from tests.kill.proxy import FAULTS, Proxy
from tests.kill.researcher import half_applied
from tests.standins import engine

# what a killed engine has trained is never lost: every step has its checkpoint
JOB = TrainJob(model="stand-in", batch_size=3, num_repeat=2, max_parallel_episodes=16, max_staleness=5, save_freq=1)
CLIENTS = tuple(DRIVERS)
#: how often which is killed
VICTIMS = {"server": 0.4, "client": 0.3, "engine": 0.3}
#: the same while a researcher syncs code and restarts the engine
CODE_VICTIMS = {"server": 0.5, "researcher": 0.4, "client": 0.1}
_START_SECONDS = 180.0
_PROGRESS_SECONDS = 180.0
_FINISH_SECONDS = 180.0


@dataclass
class Outcome:
    """What a run has to show; ``seed`` repeats its choices, though not its timing."""

    seed: int
    kills: Counter[str]
    faults: Counter[str]
    seconds: float
    witnesses: Witnesses


@dataclass
class Harness:
    """A server with its engine, clients, a proxy between, and the operator who starts the engine again.

    With ``code`` there is a researcher too, see :mod:`tests.kill.researcher`.
    """

    folder: Path
    seed: int
    serving: ServingMode
    code: bool = False
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._server: asyncio.subprocess.Process | None = None
        self._clients: dict[str, asyncio.subprocess.Process] = {}
        self._proxy = Proxy(self.seed)

    async def run(self, kills: int) -> Outcome:
        """Kill ``kills`` times, let everything finish in peace, and collect the witnesses.

        Raises:
            AssertionError: something did not start, go on, or finish in time; says what.
        """
        began = time.monotonic()
        job = JOB.model_copy(update={"serving": self.serving})
        async with self._proxy.serving() as port, self._processes():
            await self._start_server()
            await self._ask("/sync_train_config", {"yaml_as_string": dump_job(job)})
            operator = asyncio.create_task(self._operate())
            for name in (*CLIENTS, *(["researcher"] if self.code else [])):
                await self._start_client(name, port)
            await self._synced_once_more()
            for victim in self._plan(kills):
                await self._kill_one(victim, port)
            # kills that follow each other closely let no engine come up and few requests through
            await self._until(lambda: self._proxy.seen.keys() >= FAULTS.keys(), _PROGRESS_SECONDS, "a fault is missing")
            self._proxy.calm = True
            await self._synced_once_more()
            await self._until(lambda: self._acknowledged() > kills, _PROGRESS_SECONDS, "too few ends were acknowledged")
            # the engine notes it with the next batch
            await self._until(lambda: self.code or self._recorded(), _PROGRESS_SECONDS, "no step was recorded")
            await self._finish()
            pool = await self._settled()
            operator.cancel()
            await asyncio.gather(operator, return_exceptions=True)
            await self._stop_server()
            self._check_code()
        witnesses = Witnesses.read(self.folder, CLIENTS, pool)
        return Outcome(self.seed, self.kills, self._proxy.seen, time.monotonic() - began, witnesses)

    # ------------------------------------------------------------------ killing

    def _plan(self, kills: int) -> list[str]:
        """Each victim its share, in a random order."""
        victims = CODE_VICTIMS if self.code else VICTIMS
        names = list(victims)
        plan = [name for name in names for _ in range(round(kills * victims[name]))][:kills]
        plan += self._random.choices(names, k=kills - len(plan))
        self._random.shuffle(plan)
        return plan

    async def _kill_one(self, victim: str, port: int) -> None:
        moment = self._random.random()
        if moment < (0.2 if self.code else 0.5):
            # there was something to lose since the last one
            enough = self._acknowledged() + self._random.randint(1, 12)
            await self._until(lambda: self._acknowledged() >= enough, _PROGRESS_SECONDS, "no ends were acknowledged")
            await asyncio.sleep(self._random.uniform(0.0, 0.6))
        elif moment < 0.8 and not self.code:
            # a batch is out, its step about to be recorded
            steps = self._attempts()
            await self._until(lambda: self._attempts() > steps, _PROGRESS_SECONDS, "no step was trained")
            await asyncio.sleep(self._random.uniform(0.0, 0.1))
        else:
            # perhaps what is just starting
            await asyncio.sleep(self._random.uniform(0.0, 0.6))
        self.kills[victim] += 1
        match victim:
            case "server":
                assert self._server is not None
                await kill(self._server)
                # another process may listen there by now
                self._proxy.port = 0
                self._check_code()
                await self._start_server()
            case "researcher":
                await kill(self._clients["researcher"])
                await self._start_client("researcher", port)
            case "client":
                name = self._random.choice(CLIENTS)
                await kill(self._clients[name])
                await self._start_client(name, port)
            case _:
                await self._kill_engine()

    async def _synced_once_more(self) -> None:
        """Wait until the researcher was told of another snapshot; before the kills, that there is code to lose."""
        if self.code:
            so_far = self._syncs()
            await self._until(lambda: self._syncs() > so_far, _PROGRESS_SECONDS, "no code was synced")

    def _syncs(self) -> int:
        path = self.folder / "researcher.jsonl"
        return path.read_bytes().count(b'"synced"') if path.exists() else 0

    def _check_code(self) -> None:
        wrong = half_applied(self.folder / "run") if self.code else []
        assert not wrong, wrong

    async def _kill_engine(self) -> None:
        started = [line["started"] for line in self._engine_lines() if "started" in line]
        if started:
            # one that is dead already was killed while it booted
            with contextlib.suppress(ProcessLookupError):
                os.kill(started[-1], signal.SIGKILL)

    def _acknowledged(self) -> int:
        return sum(
            text.count(b'"acked"')
            for name in CLIENTS
            if (path := self.folder / f"{name}.jsonl").exists()
            for text in [path.read_bytes()]
        )

    def _attempts(self) -> int:
        return sum("trained" in line for line in self._engine_lines())

    def _recorded(self) -> bool:
        return any("recorded" in line for line in self._engine_lines())

    def _engine_lines(self) -> list[dict[str, Any]]:
        path = self.folder / "engine.jsonl"
        return lines(path) if path.exists() else []

    # ------------------------------------------------------------------ processes

    @contextlib.asynccontextmanager
    async def _processes(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            for process in (self._server, *self._clients.values()):
                if process is not None and process.returncode is None:
                    await kill(process)
            for line in self._engine_lines():
                if "started" in line:
                    await asyncio.to_thread(kill_engine, line["started"])

    async def _start(self, *arguments: str) -> asyncio.subprocess.Process:
        log = self.folder / f"{arguments[0].rpartition('.')[2]}.log"
        with log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if arguments[0].endswith("server") else output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, engine.FOLDER_VARIABLE: str(self.folder), "PYTHONPATH": str(ROOT)},
            )

    async def _start_server(self) -> None:
        self._server = await self._start("tests.kill.server", str(self.folder / "run"))
        assert self._server.stdout is not None
        async with asyncio.timeout(_START_SECONDS):
            url = (await self._server.stdout.readline()).decode().strip()
        assert url, f"the server did not start; see {self.folder}/server.log: {self._last('server.log')}"
        self._proxy.port = int(url.rpartition(":")[2])

    async def _start_client(self, name: str, port: int) -> None:
        if name == "researcher":
            self._clients[name] = await self._start("tests.kill.researcher", str(port), str(self.folder))
            return
        seed = f"{self.seed}-{name}"
        self._clients[name] = await self._start("tests.kill.client", name, str(port), str(self.folder), seed)

    def _log(self, name: str) -> str:
        return self._last("researcher.log" if name == "researcher" else "client.log")

    async def _stop_server(self) -> None:
        assert self._server is not None
        self._server.terminate()
        async with asyncio.timeout(_START_SECONDS):
            code = await self._server.wait()
        assert code in (0, -signal.SIGTERM), f"the server ended with {code}: {self._last('server.log')}"

    def _last(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")[-3000:]

    # ------------------------------------------------------------------ the operator

    async def _ask(self, path: str, body: Any = None) -> dict[str, Any]:
        """One request to the server itself, past the proxy."""
        connection = await Connection.open("127.0.0.1", self._proxy.port)
        try:
            async with asyncio.timeout(30):
                return await ask_json(connection, path, body)
        finally:
            connection.close()

    async def _operate(self) -> None:
        """Start the engine whenever it is offline; never returns."""
        while True:
            with contextlib.suppress(OSError, TimeoutError, RuntimeError):
                status = await self._ask("/get_engine_status")
                if status["engine_status"] == "ENGINE.OFFLINE":
                    await self._ask("/start_engine", {})
            await asyncio.sleep(0.1)

    # ------------------------------------------------------------------ the end

    async def _finish(self) -> None:
        """Let the clients end what they have begun, and leave."""
        (self.folder / "stop").touch()
        try:
            async with asyncio.timeout(_FINISH_SECONDS):
                codes = {name: await process.wait() for name, process in self._clients.items()}
        except TimeoutError:
            raise AssertionError(f"a client does not finish: {self._last('client.log')}") from None
        assert not any(codes.values()), f"clients ended with {codes}: {self._last('client.log')}"

    async def _settled(self) -> dict[str, Any]:
        """Wait until nothing runs and no batch is out or ready; the pool's last word."""
        pool: dict[str, Any] = {}

        async def quiet() -> bool:
            nonlocal pool
            status = await self._ask("/status?steps=0")
            pool = status["pool"]
            return (
                status["engine"]["engine_status"] == "ENGINE.ROLLING"
                and not pool["running_episodes"]
                and not pool["batched_episodes"]
                and pool["completed_tasks"] < JOB.batch_size
            )

        deadline = time.monotonic() + _FINISH_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, TimeoutError):
                if await quiet():
                    return pool
            await asyncio.sleep(0.1)
        raise AssertionError(f"the pool does not come to rest: {pool} {self._last('server.log')}")

    async def _until(self, condition: Callable[[], bool], within: float, otherwise: str) -> None:
        deadline = time.monotonic() + within
        while not condition():
            for name, process in self._clients.items():
                ended = process.returncode
                assert ended is None, f"{otherwise}: {name} ended with {ended}: {self._log(name)}"
            assert time.monotonic() < deadline, f"{otherwise} within {within:g} s; {await self._state()}"
            await asyncio.sleep(0.01)

    async def _state(self) -> str:
        try:
            status = await self._ask("/status?steps=0")
        except (OSError, TimeoutError, RuntimeError) as exc:
            return f"the server is silent ({exc!r}): {self._last('server.log')}"
        return json.dumps({key: status[key] for key in ("engine", "pool", "waiting_claims", "last_lines")})


async def kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def kill_engine(pid: int) -> None:
    """Kill an engine that its server left behind; its number may be somebody else's by now."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if engine.__file__ in process.cmdline():
            process.kill()
            process.wait(timeout=10)
