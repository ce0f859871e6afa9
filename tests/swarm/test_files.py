"""Files that are replaced as a whole, whatever happens meanwhile."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from swarm.files import beside, replace_file


def test_a_file_is_replaced_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    path.write_text("before")
    path.chmod(0o644)
    # a kill left it
    beside(path).write_text("half of it")
    beside(path).chmod(0o644)
    replace_file(path, b"after")
    assert path.read_bytes() == b"after" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "note.json"
    path.write_text("before")

    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        replace_file(path, b"after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
