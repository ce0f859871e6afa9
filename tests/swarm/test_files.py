"""Files that are replaced as a whole, whatever happens meanwhile."""

from __future__ import annotations

import math
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from swarm.files import beside, free_bytes, replace_file


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


def test_a_disk_that_does_not_tell_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    assert 0 < free_bytes(tmp_path / "is" / "not" / "there") < math.inf
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type(usage)(0, 0, 0))
    assert free_bytes(tmp_path) == math.inf
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type(usage)(10, 10, 0))
    assert free_bytes(tmp_path) == 0


def test_an_error_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "note.json"
    path.write_text("before")

    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        replace_file(path, b"after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
