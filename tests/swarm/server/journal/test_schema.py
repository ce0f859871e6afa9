from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.errors import ConfigError
from swarm.server.journal.journal import Journal
from swarm.server.journal.schema import SCHEMA_VERSION, open_to_write, reading
from tests.disks import fill, small_disk

OPEN = "import pathlib, sys; from swarm.server.journal.journal import Journal; Journal.open(pathlib.Path(sys.argv[1]))"


def open_and_close(path: Path) -> None:
    asyncio.run(Journal.open(path).close())


def test_a_folder_belongs_to_one_server(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal.open(path)
    with pytest.raises(ConfigError, match=r"in use by another swarm server \(pid \d+\)"):
        Journal.open(path)
    other = subprocess.run(
        [sys.executable, "-c", OPEN, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "in use by another swarm server" in other.stderr
    asyncio.run(journal.close())
    open_and_close(path)


def test_a_file_system_without_locks_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=r"cannot lock .*journal\.db\.lock: No locks available"):
        Journal.open(tmp_path / "journal.db")


def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as folder:
        ballast = fill(folder)
        with pytest.raises(ConfigError, match=r"cannot read the journal .*disk is full"):
            Journal.open(folder / "journal.db")
        ballast.unlink()
        open_and_close(folder / "journal.db")


def test_tables_whose_names_no_text_can_say_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    open_and_close(path)
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE runs", b"CREATE \xff\x83BLE runs"))
    with pytest.raises(ConfigError, match="cannot read the journal"):
        Journal.open(path)


def test_a_copy_on_a_disk_that_nobody_writes_is_read(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as folder:
        open_and_close(folder / "journal.db")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with reading(folder / "journal.db") as connection:
            assert connection.execute("SELECT count(*) FROM episodes").fetchone() == (0,)
        with pytest.raises(ConfigError, match="cannot write in the run folder"):
            Journal.open(folder / "journal.db")


def test_a_refused_file_leaves_the_folder_free(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"this is no database at all" * 100)
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot read the journal"):
            Journal.open(path)
    path.unlink()
    open_and_close(path)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (SCHEMA_VERSION + 1, "newer version of swarm-gateway.*upgrade"),
        (SCHEMA_VERSION - 1, "older version of swarm-gateway.*finish the run or export it with that version"),
    ],
)
def test_another_schema_is_refused(tmp_path: Path, version: int, message: str) -> None:
    path = tmp_path / "journal.db"
    connection = open_to_write(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.raises(ConfigError, match=message):
        Journal.open(path)


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="not a swarm journal"):
        Journal.open(path)
    assert path.read_bytes() == before


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write in the run folder"):
        Journal.open(tmp_path / "none" / "journal.db")


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    for part in tmp_path.glob("journal.db*"):
        if not part.name.endswith(".lock"):
            assert stat.S_IMODE(part.stat().st_mode) == 0o600, part
    asyncio.run(journal.close())


def test_the_settings_that_durability_needs(tmp_path: Path) -> None:
    connection = open_to_write(tmp_path / "journal.db")
    try:
        settings = {
            name: connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "auto_vacuum")
        }
    finally:
        connection.close()
    assert settings == {"journal_mode": "wal", "synchronous": 2, "auto_vacuum": 2}
