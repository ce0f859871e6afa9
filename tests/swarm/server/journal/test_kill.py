"""A writer that is killed at any moment loses nothing that it said was on disk, and the next one goes on from there."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
KILLS = 12

pytestmark = pytest.mark.slow


def test_nothing_acknowledged_is_missing_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    rng = random.Random(5)
    said: list[str] = []
    for life in range(KILLS):
        command = [sys.executable, "-m", "tests.swarm.server.journal.writing", str(path), f"L{life}"]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert writer.stdout is not None
        with writer, writer.stdout:
            # the moment is told in lines, so that a slow machine is killed as deep in its work as a fast one
            for _ in range(rng.randrange(1, 600)):
                line = writer.stdout.readline()
                assert line, "the writer ended by itself"
                said.append(line.strip())
            writer.kill()
            # what it said before it died counts; a torn last line was not said
            said += [line.strip() for line in writer.stdout if line.endswith("\n")]
    assert len(said) == len(set(said)) > 20 * KILLS

    connection = sqlite3.connect(path)
    rows = dict(connection.execute("SELECT uuid, state FROM episodes"))
    trajectories = connection.execute(
        "SELECT count(*) FROM episodes JOIN trajectories ON episode = uuid WHERE length(data) > 400"
    ).fetchone()[0]
    steps = [batch_id for (batch_id,) in connection.execute("SELECT batch_id FROM steps")]
    trained = sum(state == "trained" for state in rows.values())
    (whole,) = connection.execute("PRAGMA integrity_check").fetchone()
    connection.close()

    of = {kind: {line.split()[1] for line in said if line.startswith(kind)} for kind in ("claim", "end", "step")}
    assert whole == "ok"
    assert of["claim"] <= rows.keys()
    assert all(rows[name] != "claimed" for name in of["end"])
    assert trajectories == sum(state != "claimed" for state in rows.values())
    assert of["step"] <= set(steps)
    assert len(steps) == len(set(steps))
    assert trained == 32 * len(steps)
