from __future__ import annotations

from pathlib import Path

import pytest

from swarm.server.journal import Journal
from tests.swarm.server.journal.build import claimed, ended


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_log_stays_bounded_under_a_load_that_never_pauses(
    anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.server.journal.checkpoint._RECORDS", 100)
    journal = Journal.open(tmp_path / "journal.db")
    wal = tmp_path / "journal.db-wal"
    highest = written = 0
    for number in range(0, 6000, 20):
        names = [f"e{n}" for n in range(number, number + 20)]
        journal.append(*map(claimed, names), *(ended(name, tokens=200) for name in names))
        await journal.synced()
        highest = max(highest, wal.stat().st_size)
    written = (tmp_path / "journal.db").stat().st_size
    await journal.close()
    assert written > 3_000_000, "it was copied while the load went on"
    assert highest < 4_000_000, "a log that was never begun anew would have more than 20 MB"
