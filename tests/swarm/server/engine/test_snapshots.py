"""Snapshots of training code: whole or not there, the selected one stays, old ones go, a missing one is said."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import ConflictError, NotFoundError, RequestError
from swarm.server.engine import snapshots as module
from swarm.server.engine.snapshots import KEPT, Snapshots
from tests.kill.researcher import half_applied
from tests.swarm.code_snapshots.making import zipped

ROOT = Path(__file__).parents[4]


def packed(tmp_path: Path, text: str) -> bytes:
    code = tmp_path / "mine"
    code.mkdir(exist_ok=True)
    (code / "agent.py").write_text(text)
    return zipped(code)


def test_the_selected_one_is_known_to_the_next_server(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "run")
    assert snapshots.selected() is None
    first = snapshots.add(packed(tmp_path, "1"), sender="me", revision="abc", message="try it")
    assert snapshots.selected() is None, "added is not selected"
    snapshots.select(first.id)
    assert Snapshots(tmp_path / "run").selected() == first
    files = snapshots.files(first.id)
    assert files.is_absolute() and (files / "agent.py").read_text() == "1"
    about = first.about
    assert (about.sender, about.revision, about.message, about.files, about.bytes) == ("me", "abc", "try it", 1, 1)
    assert re.fullmatch(r"\d{8}_\d{6}_\d{6}-" + first.digest[:16], first.id)
    with pytest.raises(RequestError):
        snapshots.add(b"no zip")
    assert snapshots.selected() == first
    snapshots.select(None)
    assert Snapshots(tmp_path / "run").selected() is None


def test_the_same_code_again_is_the_same_snapshot_unless_its_files_were_changed(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "run")
    first = snapshots.add(packed(tmp_path, "1"))
    snapshots.select(first.id)
    (snapshots.files(first.id) / "__pycache__").mkdir()
    assert snapshots.add(packed(tmp_path, "1")) == first
    (snapshots.files(first.id) / "agent.py").write_text("changed by a run")
    again = snapshots.add(packed(tmp_path, "1"))
    assert (again.digest, again.id > first.id) == (first.digest, True)
    with pytest.raises(ConflictError, match="were changed"):
        snapshots.check(first)


def test_only_the_latest_are_kept_and_the_selected_one(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "run")
    ids = [snapshots.add(packed(tmp_path, str(n))).id for n in range(KEPT + 3)]
    snapshots.select(ids[0])
    assert [one.id for one in snapshots.all()] == [ids[0], *ids[3:]]
    newest = snapshots.add(packed(tmp_path, "new")).id
    snapshots.select(newest)
    assert [one.id for one in snapshots.all()] == [*ids[3:], newest]


def test_the_later_one_comes_behind_an_earlier_one_of_a_clock_that_was_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.now(tz) + timedelta(hours=5)

    snapshots = Snapshots(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(module, "datetime", Ahead)
        earlier = [snapshots.add(packed(tmp_path, str(n))).id for n in range(KEPT)]
    later = snapshots.add(packed(tmp_path, "later"))
    assert [one.id for one in snapshots.all()] == [*earlier, later.id]
    assert later.about.created < datetime.now(UTC).timestamp() + 1
    latest = snapshots.add(packed(tmp_path, "latest")).id
    snapshots.select(latest)
    assert [one.id for one in snapshots.all()] == [*earlier[1:], later.id, latest], "the oldest goes"


def test_what_is_selected_is_on_disk_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = Snapshots(tmp_path / "run")
    first, second = (snapshots.add(packed(tmp_path, text)) for text in "12")
    snapshots.select(first.id)
    there = sorted((tmp_path / "run" / "code").iterdir())

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            snapshots.select(second.id)
    assert snapshots.selected() == first
    assert sorted((tmp_path / "run" / "code").iterdir()) == there, "nothing is left of it"


def test_what_a_killed_server_left_is_cleaned_away(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    left = tmp_path / "code" / ".partial-abc"
    left.mkdir(parents=True)
    (left / "half.py").write_text("")
    # without what is known of it, it is no snapshot
    half = tmp_path / "code" / "20261122_101500_123456-0123456789abcdef" / "files"
    half.mkdir(parents=True)
    assert snapshots.all() == []
    snapshots.add(packed(tmp_path, "1"))
    assert not left.exists()
    with pytest.raises(NotFoundError):
        snapshots.named(half.parent.name)


def test_what_is_said_of_one_is_kept_whatever_the_locale(tmp_path: Path) -> None:
    (tmp_path / "code.zip").write_bytes(packed(tmp_path, "1"))
    add = (
        "from pathlib import Path\n"
        "from swarm.server.engine.snapshots import Snapshots\n"
        "Snapshots(Path('run')).add(Path('code.zip').read_bytes(), message='na\\xefve')\n"
    )
    of_no_unicode = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", add], env={**os.environ, **of_no_unicode}, cwd=tmp_path, check=True)
    assert [stored.about.message for stored in Snapshots(tmp_path / "run").all()] == ["naïve"]


def test_a_selected_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    stored = snapshots.add(packed(tmp_path, "1"))
    snapshots.select(stored.id)
    shutil.rmtree(tmp_path / "code" / stored.id)
    for name in (stored.id, "../../etc", "0" * 64):
        (tmp_path / "code" / "selected").write_text(name)
        with pytest.raises(FileNotFoundError, match="sync it again"):
            Snapshots(tmp_path).selected()


# adds, selects and goes back for ever; says so once it has begun, and what it has selected
WRITER = """
import random, sys
from pathlib import Path
from swarm.server.engine.snapshots import Snapshots
from tests.kill.researcher import archive
snapshots = Snapshots(Path(sys.argv[1]))
number = int(sys.argv[2])
print("begun", flush=True)
while True:
    number += 1
    snapshots.select(snapshots.add(archive(f"NUMBER = {number}")).id)
    print(number, flush=True)
    if number % 4 == 0:
        earlier = random.choice(snapshots.all())
        snapshots.check(earlier)
        snapshots.select(earlier.id)
"""


@pytest.mark.slow
def test_no_kill_leaves_a_half_snapshot(tmp_path: Path) -> None:
    """``SWARM_KILLS`` SIGKILLs, default 10, at any moment of adding and selecting."""
    selected: set[str] = set()
    for kill in range(int(os.environ.get("SWARM_KILLS", "10"))):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(kill * 10_000)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            # from before the first one is added to after the fourth is selected
            for _ in range(1 + kill % 5):
                assert writer.stdout.readline()
            time.sleep(random.uniform(0.0, 0.1))
            writer.kill()
        assert half_applied(tmp_path) == []
        stored = Snapshots(tmp_path).selected()
        if stored is not None:
            selected.add(stored.id)
    assert len(selected) > 2, "it was never in the middle of anything"
