"""The servers under measurement, each in a process of its own: as ``swarm-gateway swarm start`` runs one, but with the
stand-in of :mod:`benchmarks.engine`, or all that ``swarm-gateway up`` starts, with the real engine.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from benchmarks.wire import Connection, address_of, ask_json
from swarm.job import TrainJob, dump_job

ROOT = Path(__file__).parent.parent
ENGINE_COMMAND = (sys.executable, "-m", "benchmarks.engine")
_START_SECONDS = 180
BOOT_SECONDS, STOP_SECONDS = 900.0, 180.0


@dataclass(frozen=True)
class Running:
    """A server that listens at ``url``."""

    url: str
    process: BaseProcess

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    async def connect(self) -> Connection:
        return await Connection.open(*address_of(self.url))


@contextlib.contextmanager
def running(target: Callable[..., None], *arguments: Any) -> Generator[Running]:
    """``target(*arguments, announce)`` in a spawned process, which calls ``announce(url)`` once it listens."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_announcing, args=(target, arguments, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_SECONDS):
            raise RuntimeError("the server did not start")
        yield Running(ours.recv(), process)
    finally:
        process.terminate()
        process.join(timeout=30)
        if process.is_alive():
            process.kill()
            process.join()


def _announcing(target: Callable[..., None], arguments: tuple[Any, ...], pipe: Pipe) -> None:
    target(*arguments, pipe.send)


def swarm_server(
    run_dir: str,
    announce: Callable[[str], None],
    *,
    allow_code_sync: bool = False,
    engine_command: tuple[str, ...] | None = ENGINE_COMMAND,
) -> None:
    """A swarm server on a free port, with the stand-in engine or (``None``) the real one; runs until SIGTERM."""
    from swarm.server.app import run
    from swarm.server.config import ServerConfig

    # the engine imports this package, from wherever the benchmark is started
    os.environ["PYTHONPATH"] = str(ROOT)
    config = ServerConfig(port=0, run_dir=Path(run_dir), allow_code_sync=allow_code_sync)
    run(config, engine_command=engine_command, on_ready=announce, log_level="error")


def dict_server(announce: Callable[[str], None]) -> None:
    """Claims and ends on a dict in memory and nothing else: what HTTP alone costs here."""
    from swarm.http.serve import bind, run_app

    sock = bind("127.0.0.1", 0)
    port: int = sock.getsockname()[1]
    episodes: dict[str, Any] = {}

    async def claim(request: Request) -> Response:
        wanted = await request.json()
        episode = uuid.uuid4().hex
        episodes[episode] = wanted["client_uuid"]
        return JSONResponse({"success": True, "episode_uuid": episode})

    async def end(request: Request) -> Response:
        wanted = await request.json()
        del episodes[wanted["episode_uuid"]]
        return JSONResponse({"success": True, "error": None})

    routes = [Route("/claim_episode", claim, methods=["POST"]), Route("/end_episode", end, methods=["POST"])]
    announce(f"http://127.0.0.1:{port}")
    run_app(Starlette(routes=routes), sock)


async def start_engine(server: Running, job: TrainJob) -> None:
    """Give the server its job and wait until the engine serves."""
    connection = await server.connect()
    await ask_json(connection, "/sync_train_config", {"yaml_as_string": dump_job(job)})
    await ask_json(connection, "/start_engine", {})
    status = await ask_json(connection, "/status?wait_state=ENGINE.ROLLING&wait_seconds=60")
    connection.close()
    if status["engine"]["engine_status"] != "ENGINE.ROLLING":
        raise RuntimeError(f"the engine does not roll: {status['engine']} {status['last_lines']}")


@contextlib.contextmanager
def up(
    folder: Path, job: Mapping[str, Any], gateway: Mapping[str, Any], *hooks: str, **environment: str
) -> Generator[dict[str, str]]:
    """``swarm-gateway up`` with the real verl and vLLM on a CPU, from when it is ready to the end of the block.

    Args:
        folder: a new one, for its files; ``up.log`` is what it says.
        job, gateway: the sections of its configuration; the model is served as ``policy``.
        hooks: sources of the hook files, each named by the function that it begins with.
        environment: variables beside those of this process.

    Yields:
        The addresses of its servers, by name.
    """
    folder.mkdir(parents=True)
    for source in hooks:
        name = source.partition("def ")[2].partition("(")[0]
        (folder / f"{name}.py").write_text(source)
    sections = {
        "job": {"served_model_name": "policy", "device": "cpu", **job},
        "swarm": {"port": 0, "run_dir": "run", "boot_timeout": BOOT_SECONDS},
        "gateway": {"port": 0, "hooks": ".", "routes": [{"name": "policy"}], **gateway},
    }
    path, log = folder / "up.yaml", folder / "up.log"
    path.write_text(yaml.safe_dump(sections))
    with log.open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "up", str(path), "--json"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield _ready(process, log)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End ``process``; kill it if it has not ended after :data:`STOP_SECONDS`."""
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
