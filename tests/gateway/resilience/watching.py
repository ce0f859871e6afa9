"""One gateway process and what it tells of its requests.

Invariant: the process is gone when its ``async with`` ends, and whoever waits for word of a request has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.processes import ROOT

_START_SECONDS = 240.0
_STOP_SECONDS = 40.0
_WORD_SECONDS = 120.0


@dataclass
class Word:
    """What is known of one request: the phases it was in, and in which its caller left it (``""``: in none)."""

    been: set[str] = field(default_factory=set[str])
    left: str | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)


class GatewayProcess:
    """Use :func:`gateway_process`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._words: dict[str, Word] = {}
        self.port = 0

    def word(self, request: str) -> Word:
        """Of the request with this id, which may be on its way yet."""
        return self._words.setdefault(request, Word())

    async def reached(self, request: str, phase: str) -> None:
        """Return once the request is in ``phase``, or is over."""
        word = self.word(request)
        while phase not in word.been and word.left is None:
            word.news.clear()
            await word.news.wait()

    async def left(self, request: str) -> str:
        """In which phase the gateway saw the caller leave; empty where the answer was out by then.

        Raises:
            AssertionError: it did not notice in two minutes.
        """
        word = self.word(request)
        try:
            async with asyncio.timeout(_WORD_SECONDS):
                while word.left is None:
                    word.news.clear()
                    await word.news.wait()
        except TimeoutError:
            raise AssertionError(f"the gateway does not notice that {request} left; it was in {word.been}") from None
        return word.left

    async def kill(self) -> None:
        """Send SIGKILL; it is dead on return."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def listen(self) -> None:
        """Take in what it tells, until it ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            told: dict[str, Any] = json.loads(line)
            if "url" in told:
                self.port = int(told["url"].rpartition(":")[2])
                return
            word = self.word(told["request"])
            if "at" in told:
                word.been.add(told["at"])
            else:
                word.left = told["left"]
            word.news.set()


@contextlib.asynccontextmanager
async def gateway_process(folder: Path, config: dict[str, Any]) -> AsyncGenerator[GatewayProcess]:
    """A gateway by ``config`` in a process of its own, ready when the block begins; its log is in ``folder``."""
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(config))
    with (folder / "gateway.log").open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.gateway.resilience.gateway",
            str(path),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    gateway = GatewayProcess(process)
    listening: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(_START_SECONDS):
            await gateway.listen()
        assert gateway.port, f"the gateway did not start: {path.with_suffix('.log').read_text()[-3000:]}"
        listening = asyncio.create_task(gateway.listen())
        yield gateway
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if listening is not None:
            await listening
