"""Code sync: from a folder of many files to the selected snapshot of a server on this machine, part by part.

The folder is a new git checkout of Python files of about 1 kB. ``pack`` lists and packs it, ``sync`` is the request to
a swarm server (started in this process) with extraction, check and selection, ``again`` the same once more: a no-op.
CPU seconds are of this process, without git's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx

from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.sync import build_archive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--files", type=int, default=10_000)


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(asyncio.run(measure(Path(temporary), options.files))))


async def measure(folder: Path, files: int) -> dict[str, Any]:
    code = folder / "code"
    make(code, files)
    seconds: dict[str, float] = {}
    cpu: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(name: str) -> Generator[None]:
        began, began_cpu = time.monotonic(), time.process_time()
        yield
        seconds[name], cpu[name] = time.monotonic() - began, time.process_time() - began_cpu

    with timed("pack"):
        archive = build_archive(code)
    app = create_app(ServerConfig(run_dir=folder / "run", allow_code_sync=True), engine_command=("none",))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=300, verify=False) as client,
    ):
        for name in ("sync", "again"):
            with timed(name):
                headers = {"content-type": "application/zip"}
                answer = await client.post("/sync_train_code", content=archive.content, headers=headers)
            told = answer.raise_for_status().json()
            assert told["snapshot"]["digest"] == archive.digest and told["changed"] is (name == "sync")
    return {
        "files": len(archive.manifest),
        "archive_bytes": len(archive.content),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "cpu_seconds": {name: round(value, 3) for name, value in cpu.items()},
        "total_seconds": round(seconds["pack"] + seconds["sync"], 3),
    }


def make(code: Path, files: int) -> None:
    for number in range(files):
        path = code / f"package{number % 100}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import json\n\nNUMBER = {number}\n" + f"def f{number}(x):\n    return x * {number}\n" * 25)
    for arguments in (("init", "--quiet"), ("add", ".")):
        subprocess.run(["git", *arguments], cwd=code, check=True)
