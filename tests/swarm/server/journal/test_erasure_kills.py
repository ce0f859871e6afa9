"""A deletion that is killed at any of its steps is done by the next server that opens the journal."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import anyio
import pytest

from swarm.server.journal.erasure import bury, clear, delete, undone
from swarm.server.journal.journal import Journal
from swarm.server.journal.schema import open_to_write
from tests.swarm.server.journal.test_erasure import filled, stone, traces

pytestmark = pytest.mark.slow

KILLS = 20


def killed(path: Path, after: int) -> bool:
    """Delete in a process of its own that is killed before its statement number ``after``; whether it was."""
    child = os.fork()
    if not child:
        try:
            connection = open_to_write(path)
            bury(path.parent, stone())
            statements = iter(range(10_000))

            def dies(_: str) -> None:
                if next(statements) == after:
                    os.kill(os.getpid(), signal.SIGKILL)

            connection.set_trace_callback(dies)
            stones = undone(connection, path.parent)
            delete(connection, path.parent, stones)
            clear(connection, path, stones)
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

    hers = anyio.run(fill)
    deaths = 0
    for number in range(KILLS):
        folder = tmp_path / f"killed {number}"
        folder.mkdir()
        path = folder / "journal.db"
        shutil.copy(tmp_path / "full.db", path)
        deaths += killed(path, number)
        anyio.run(start_again, path)
        assert [name for name in hers if traces(folder, name)] == [], f"killed before statement {number}"
    # the last ones come after the end
    assert deaths >= 12
