"""The ledger: what is written is there, what a kill cut off is not, and one process has it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from swarm.errors import ConfigError, StateError
from swarm.research.ledger import FILE, Ledger, Run, fold, read
from tests.swarm.research.test_decisions import begun, claimed, ended, measured, proposed


def write(ledger: Ledger, *events: dict[str, object]) -> None:
    for event in events:
        ledger.append(str(event["event"]), **{key: value for key, value in event.items() if key not in ("event", "at")})


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        write(ledger, begun(), claimed("base"), measured("base", 2, [0.5]), ended("base"), proposed("e1"))
        state = ledger.state
    assert read(tmp_path) == state
    with Ledger(tmp_path) as ledger:
        assert ledger.state == state


def test_a_line_that_a_kill_cut_off_is_forgotten(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        write(ledger, begun())
        state = read(tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"event": "claimed", "run": "ba')
    assert read(tmp_path) == state
    with Ledger(tmp_path) as ledger:
        assert (tmp_path / FILE).read_bytes() == whole
        write(ledger, claimed("base"))
    assert list(read(tmp_path).runs) == ["base"]


def test_one_process_has_it_and_damage_is_said(tmp_path: Path) -> None:
    with Ledger(tmp_path), pytest.raises(ConfigError, match="another process runs the study"):
        Ledger(tmp_path)
    (tmp_path / FILE).write_text("no json\n")
    with pytest.raises(ConfigError, match="is damaged"):
        Ledger(tmp_path)
    with pytest.raises(ConfigError, match="is damaged"):
        read(tmp_path)


def test_what_cannot_happen_is_not_written(tmp_path: Path) -> None:
    before = [
        begun(),
        claimed("base"),
        measured("base", 2, [0.5]),
        ended("base"),
        proposed("e1"),
        proposed("e2", refused="x"),
    ]
    wrong = [
        begun(),
        claimed("base"),
        ended("base"),
        measured("base", 4, [0.5]),
        proposed("e1"),
        claimed("e2"),
        claimed("e9"),
        claimed("e1.seed1"),
        {"event": "finished", "why": ""},
        {"event": "verdict", "experiment": "e1", "verdict": "kept", "interval": None, "why": ""},
    ]
    with Ledger(tmp_path) as ledger:
        write(ledger, *before)
        lines = (tmp_path / FILE).read_bytes()
        for event in wrong:
            with pytest.raises(StateError):
                write(ledger, event)
        with pytest.raises(ValueError, match="not JSON compliant"):
            ledger.append("measured", run="base", step=4, scores=[float("nan")], rewards={})
        assert (tmp_path / FILE).read_bytes() == lines


def test_a_full_disk_ends_the_writing_and_its_half_line_is_forgotten(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger(tmp_path) as ledger:
        write(ledger, begun())
        lines = (tmp_path / FILE).read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(lines) + 10, hard))
        try:
            with pytest.raises(OSError, match="the disk is full"):
                write(ledger, claimed("base"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        # another thread's event would follow from one that is not there
        with pytest.raises(OSError, match="an earlier event was not written"):
            write(ledger, measured("base", 2, [0.5]))
    assert not read(tmp_path).runs
    with Ledger(tmp_path):
        assert (tmp_path / FILE).read_bytes() == lines


def test_another_attempt_measures_anew() -> None:
    events = [begun(), claimed("base"), measured("base", 2, [0.5]), claimed("base")]
    assert list(fold(events).runs["base"].scores) == [2]
    assert fold([*events, claimed("base", attempt=2)]).runs["base"].scores == {}


@pytest.mark.parametrize("run", [Run("base"), Run("e12"), Run("e1", "seed", 3), Run("base", "control", 10)])
def test_runs_are_known_by_their_names(run: Run) -> None:
    assert Run.named(run.name) == run
