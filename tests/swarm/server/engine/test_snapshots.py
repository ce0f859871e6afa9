"""Snapshots of training code: the selected one stays, old ones go, a missing one is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm.errors import RequestError
from swarm.server.engine.snapshots import KEPT, Snapshots
from tests.swarm.sync.making import zipped


def packed(tmp_path: Path, text: str) -> bytes:
    code = tmp_path / "mine"
    code.mkdir(exist_ok=True)
    (code / "agent.py").write_text(text)
    return zipped(code)


def test_the_selected_one_is_known_to_the_next_server(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "run")
    assert snapshots.selected() is None
    first = snapshots.add(packed(tmp_path, "1"))
    assert snapshots.selected() is None, "added is not selected"
    snapshots.select(first)
    assert Snapshots(tmp_path / "run").selected() == first
    assert first.is_absolute() and (first / "agent.py").read_text() == "1"
    with pytest.raises(RequestError):
        snapshots.add(b"no zip")
    assert snapshots.selected() == first


def test_the_same_code_again_is_as_it_was_sent(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "run")
    first = snapshots.add(packed(tmp_path, "1"))
    snapshots.select(first)
    (first / "agent.py").write_text("changed by a run")
    (first / "cache").mkdir()
    assert snapshots.add(packed(tmp_path, "1")) == first
    assert [(path.name, path.read_text()) for path in first.iterdir()] == [("agent.py", "1")]


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "run")
    folders: list[Path] = []
    for n in range(KEPT + 3):
        folders.append(snapshots.add(packed(tmp_path, str(n))))
        snapshots.select(folders[-1])
        os.utime(folders[-1], (n, n))
    # back to the oldest that is left: it is the newest again
    oldest = folders[-KEPT]
    snapshots.select(oldest)
    assert {path for path in (tmp_path / "run/code").iterdir() if path.is_dir()} == set(folders[-KEPT:])
    newest = snapshots.add(packed(tmp_path, "new"))
    snapshots.select(newest)
    left = {path for path in (tmp_path / "run/code").iterdir() if path.is_dir()}
    assert left == {newest, oldest, *folders[-KEPT + 2 :]}


def test_what_a_killed_server_left_is_cleaned_away(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    left = tmp_path / "code" / ".partial-abc"
    left.mkdir(parents=True)
    (left / "half.py").write_text("")
    snapshots.add(packed(tmp_path, "1"))
    assert not left.exists()


@pytest.mark.parametrize("name", ["../../etc", "", "0" * 64])
def test_a_selected_folder_that_is_gone_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "selected").write_text(name)
    with pytest.raises(FileNotFoundError, match="sync_train_code again"):
        Snapshots(tmp_path).selected()
