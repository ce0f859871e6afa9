"""The files that tell what ran."""

from __future__ import annotations

from pathlib import Path

from swarm.job import TrainJob
from swarm.server.engine.history import History


def test_only_the_owner_reads_a_file(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.begin("run", TrainJob(model="tiny"), None)
    history.resolved({"lr": 1})
    history.end("stopped")
    (path,) = (tmp_path / "history").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert history.record(1).config == {"lr": 1}
