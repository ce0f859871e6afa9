"""SIGKILL at any point of a study: what runs next goes on, no step is trained twice, and the verdicts are the same."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swarm.research.ledger import FILE, Ledger, State, read
from swarm.research.running import Runner, begin
from swarm.research.study import read_study
from tests.swarm.research.making import ScriptedLab, doubles, folder_of, told
from tests.swarm.research.test_decisions import verdicts

KILLS = 20
SECONDS = 60


class Mortal:
    """Kills its process at the ``life``-th point; 0: never."""

    def __init__(self, life: int) -> None:
        self._left = life

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class PointedLedger(Ledger):
    """A ledger with points before and after each event."""

    point = staticmethod(lambda: None)

    def append(self, event: str, **values: Any) -> None:
        self.point()
        super().append(event, **values)
        self.point()


def live(folder: Path, life: int) -> None:
    """One process of the study."""
    point = Mortal(life)
    study = read_study(folder)
    lab = ScriptedLab(study, folder / "runs" / "engines.jsonl", point)
    with PointedLedger(folder) as ledger:
        ledger.point = point  # type: ignore[method-assign]
        if not ledger.state.study:
            begin(study, folder, ledger)
        Runner(study, folder, ledger, lab, lambda kind, values: None).run(threading.Event())


def lived(folder: Path, life: int) -> int:
    """The exit code of a process that lives for so many points."""
    process = multiprocessing.get_context("fork").Process(target=live, args=(folder, life))
    process.start()
    process.join(SECONDS)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def finished(folder: Path, lives: list[int]) -> tuple[State, int]:
    """The study's end and how often it was killed."""
    (folder / "runs").mkdir()
    (folder / "runs" / "engines.jsonl").touch()
    kills = 0
    draw = random.Random(0)
    for life in lives:
        code = lived(folder, life)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        if code and draw.random() < 0.3:
            with (folder / FILE).open("ab") as file:
                file.write(b'{"event": "measured", "at": 17')
    assert lived(folder, 0) == 0
    return read(folder), kills


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    servers = ["http://a", "http://b"]
    calm, _ = finished(folder_of(tmp_path / "calm", servers=servers), [])
    draw = random.Random(7)
    folder = folder_of(tmp_path / "killed", servers=servers)
    killed, kills = finished(folder, [draw.randint(3, 20) for _ in range(KILLS)])
    assert kills == KILLS and len(killed.experiments) == 12
    assert killed.finished == calm.finished and (killed.finished or "").startswith("kept e12")
    assert verdicts(killed) == verdicts(calm)
    assert {name: one.interval for name, one in killed.experiments.items()} == {
        name: one.interval for name, one in calm.experiments.items()
    }
    # none done twice, none lost
    log = folder / "runs" / "engines.jsonl"
    assert doubles(log) == []
    assert set(Counter(one["start"] for one in told(log) if "start" in one).values()) == {1}
    assert killed.runs.keys() == calm.runs.keys() and all(one.attempt == 1 for one in killed.runs.values())
    assert {name: run.scores for name, run in killed.runs.items()} == {
        name: run.scores for name, run in calm.runs.items()
    }
