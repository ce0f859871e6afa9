"""The process that resolves a job: one at a time, and nothing is left of it. Shell scripts stand in for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio.lowlevel
import pytest

from swarm.errors import ConfigError
from swarm.job import layered
from swarm.server.engine.resolving import Resolver
from tests.processes import alive

pytestmark = pytest.mark.anyio

LAYERS = layered({"model": "tiny"})


def resolver(tmp_path: Path, script: str) -> Resolver:
    return Resolver(tmp_path, ("sh", "-c", f"cd {tmp_path}; {script}"))


@pytest.mark.parametrize("then", ["exit 0", "sleep 100"])
async def test_what_it_started_ends_with_it(tmp_path: Path, then: str) -> None:
    # the child holds the pipes open, though the process itself may have ended
    asking = asyncio.create_task(
        resolver(tmp_path, f"cat > question; sleep 100 & echo $! > partial; mv partial pid; {then}").resolve(
            LAYERS, None
        )
    )
    async with asyncio.timeout(20):
        while not (tmp_path / "pid").exists():
            await anyio.lowlevel.checkpoint()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while alive(int((tmp_path / "pid").read_text())):
            await anyio.lowlevel.checkpoint()


async def test_one_at_a_time(tmp_path: Path) -> None:
    one = resolver(tmp_path, """echo begin >> log; cat > /dev/null; echo end >> log; echo '{"error": "no"}'""")
    answers = await asyncio.gather(*(one.resolve(LAYERS, None) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ConfigError] * 3
    assert (tmp_path / "log").read_text().split() == ["begin", "end"] * 3
