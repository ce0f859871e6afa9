"""Code sync: ``swarm-gateway code sync`` and ``rollback`` as commands, from a git checkout to the engine that runs it.

The checkout is new, of Python files of about 1 kB; the swarm server and each command are processes of their own, on
this machine; the engine is the stand-in of :mod:`benchmarks.engine`. ``sync`` sends all files, ``again`` the same once
more (a no-op), ``line`` those with one changed line, ``restart`` another one with ``--force-restart``, and ``rollback``
goes back with it. Seconds are wall time, and CPU time of the command with git and of the server. ``boot`` is what the
engine takes to start and to serve, ``beside_boot`` what a restart takes more than that. ``wrong_key`` is what
``swarm-gateway config sync`` takes to refuse a key that verl does not have.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import ROOT, Running, running, swarm_server
from benchmarks.vllm import MODEL
from swarm.client import SwarmClient
from swarm.job import TrainJob
from swarm.states import EngineState


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--files", type=int, default=10_000)


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with running(functools.partial(swarm_server, allow_code_sync=True), str(folder / "run")) as server:
            report = measure(server, folder / "code", options.files)
        if find_spec("verl") is not None:
            real = functools.partial(swarm_server, engine_command=None)
            with running(real, str(folder / "other")) as server:
                report["wrong_key"] = refusal(server, folder / "job.yaml")
        print(json.dumps(report))


def measure(server: Running, code: Path, files: int) -> dict[str, Any]:
    make(code, files)
    report: dict[str, Any] = {"files": files}
    report["sync"], told = command(server, "sync", str(code))
    report["archive_bytes"] = told["archive_bytes"]
    report["again"], told = command(server, "sync", str(code))
    assert told["changed"] is False
    change(code)
    report["line"], _ = command(server, "sync", str(code))
    with SwarmClient(server.url) as client:
        client.sync_train_config(TrainJob(model=MODEL))
        began = time.monotonic()
        client.start_engine()
        client.wait_for_state(EngineState.ROLLING, wait_seconds=60)
        report["boot"] = round(time.monotonic() - began, 3)
    change(code)
    for name, arguments in (("restart", ("sync", str(code))), ("rollback", ("rollback",))):
        report[name], told = command(server, *arguments, "--force-restart")
        assert told["restarted"] and told["engine"].startswith(EngineState.ROLLING), told
        report[name]["beside_boot"] = round(report[name]["seconds"] - report["boot"], 3)
    return report


def refusal(server: Running, job: Path) -> dict[str, float]:
    """What it takes to refuse a wrong key of verl's, with the nearest right one."""
    job.write_text("model: HuggingFaceTB/SmolLM2-135M-Instruct\ndevice: cpu\n")
    wrong = "actor_rollout_ref.actor.clip_rato=0.3"
    measured, done = timed(server, "config", "sync", str(job), "--set", wrong)
    assert done.returncode == 2 and b"actor_rollout_ref.actor.clip_ratio" in done.stderr, done
    return measured


def command(server: Running, *arguments: str) -> tuple[dict[str, float], dict[str, Any]]:
    """What ``swarm-gateway code`` takes with these arguments, and what it prints."""
    measured, done = timed(server, "code", *arguments, "--json")
    assert done.returncode == 0, done
    return measured, json.loads(done.stdout)


def timed(server: Running, *arguments: str) -> tuple[dict[str, float], subprocess.CompletedProcess[bytes]]:
    """What ``swarm-gateway`` takes with these arguments."""
    whole = [sys.executable, "-m", "gateway.cli", *arguments, "--swarm-url", server.url]
    process, began = psutil.Process(server.pid), time.monotonic()
    before = _cpu(process)
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, check=False, timeout=300)
    seconds = time.monotonic() - began
    client_cpu, server_cpu = (after - at for after, at in zip(_cpu(process), before, strict=True))
    measured = {"seconds": seconds, "command_cpu": client_cpu, "server_cpu": server_cpu}
    return {name: round(value, 3) for name, value in measured.items()}, done


def _cpu(server: psutil.Process) -> tuple[float, float]:
    """CPU seconds so far: of commands that have ended, and of the server with the processes that it waited for."""
    children, own = resource.getrusage(resource.RUSAGE_CHILDREN), server.cpu_times()
    return children.ru_utime + children.ru_stime, sum(own[:4])


def make(code: Path, files: int) -> None:
    for number in range(files):
        path = code / f"package{number % 100}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import json\n\nNUMBER = {number}\n" + f"def f{number}(x):\n    return x * {number}\n" * 25)
    for arguments in (("init", "--quiet"), ("add", ".")):
        subprocess.run(["git", *arguments], cwd=code, check=True)


def change(code: Path) -> None:
    """Add a line to the first file."""
    with (code / "package0/module0.py").open("a") as file:
        file.write("# changed\n")
