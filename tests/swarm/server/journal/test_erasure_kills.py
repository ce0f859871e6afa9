"""A deletion that is killed at any point is done by the next server that opens the journal."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from swarm.server.journal.erasure import bury, clear, delete, undone
from swarm.server.journal.journal import Journal
from swarm.server.journal.schema import open_to_write
from tests.swarm.server.journal.test_erasure import filled, stone, traces

pytestmark = pytest.mark.slow

KILLS = 20
#: instructions of SQLite's machine between two points, so that some are inside of a statement
_INSTRUCTIONS = 50


def deleting(path: Path, point: Callable[[], None]) -> None:
    """Delete as a server does, and call ``point`` at many points of that."""
    connection = open_to_write(path)
    point()
    bury(path.parent, stone())
    connection.set_trace_callback(lambda _: point())
    connection.set_progress_handler(point, _INSTRUCTIONS)
    stones = undone(connection, path.parent)
    delete(connection, path.parent, stones)
    clear(connection, path, stones)
    point()
    connection.close()


def killed(path: Path, at: int) -> bool:
    """Delete in a process of its own that is killed at point number ``at``; whether it was."""
    child = os.fork()
    if not child:
        points = iter(range(10**9))

        def dies() -> None:
            if next(points) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            deleting(path, dies)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_deletion_survives_a_kill_at_twenty_points(tmp_path: Path) -> None:
    async def fill() -> list[str]:
        journal, hers = await filled(tmp_path / "full.db", 3, 60)
        await journal.close()
        return hers

    async def start_again(path: Path) -> None:
        await Journal.open(path).close()

    def copied(name: str) -> Path:
        (tmp_path / name).mkdir()
        return shutil.copy(tmp_path / "full.db", tmp_path / name / "journal.db")

    hers = anyio.run(fill)
    points: list[int] = []
    deleting(copied("whole"), lambda: points.append(0))
    for number in range(KILLS):
        path = copied(f"killed {number}")
        at = number * (len(points) - 1) // (KILLS - 1)
        assert killed(path, at)
        if not number:
            # before its tombstone it was not begun
            assert traces(path.parent, hers[0])
            bury(path.parent, stone())
        anyio.run(start_again, path)
        assert [name for name in hers if traces(path.parent, name)] == [], f"killed at point {at} of {len(points)}"
