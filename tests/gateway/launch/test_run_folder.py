"""Run folders: what a fresh start keeps, and folders that somebody uses."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest
import yaml

from gateway.launch.run_folder import check_free, held, keep_earlier, set_aside, write_section
from swarm.checkpoints import saved_step
from swarm.errors import ConfigError
from swarm.job import TrainJob
from tests.disks import fill, small_disk


def test_a_fresh_start_keeps_the_run_beside_and_what_is_the_servers_in_place(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert set_aside(folder) is None
    for name in ("code/a", "checkpoints/global_step_1", "refused"):
        (folder / name).mkdir(parents=True)
    (folder / "tokens.json").write_text("{}")
    (folder / "journal.db").write_text("")
    assert set_aside(folder) == tmp_path / "run-1"
    assert sorted(path.name for path in folder.iterdir()) == ["code", "refused", "tokens.json"]
    assert {"journal.db", "checkpoints"} <= {path.name for path in (tmp_path / "run-1").iterdir()}
    assert set_aside(folder) == tmp_path / "run-2"


def test_a_file_system_without_locks_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=r"cannot lock the run folder .*: No locks available"), held(tmp_path):
        pass


def test_a_folder_in_use_is_neither_held_twice_nor_renamed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with held(folder):
        for use in (lambda: held(folder).__enter__(), lambda: set_aside(folder)):
            with pytest.raises(ConfigError, match="in use by another `up`"):
                use()
    with held(folder), pytest.raises(ConfigError):
        set_aside(folder)
    lock = folder / "journal.db.lock"
    with lock.open("w") as server:
        fcntl.flock(server, fcntl.LOCK_EX)
        server.write("123")
        server.flush()
        with pytest.raises(ConfigError, match=r"in use by a swarm server \(pid 123\)"):
            set_aside(folder)
    assert set_aside(folder) == tmp_path / "run-1"


def test_only_a_whole_checkpoint_is_saved(tmp_path: Path) -> None:
    job, folder = TrainJob(model="m"), tmp_path / "checkpoints"
    assert saved_step(job, tmp_path) == 0
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    assert saved_step(job, tmp_path) == 0
    (folder / "global_step_10").mkdir()
    assert saved_step(job, tmp_path) == 10
    assert saved_step(job.model_copy(update={"checkpoint_dir": str(tmp_path / "other")}), tmp_path) == 0


def test_whether_a_folder_is_free_is_found_out_without_a_touch(tmp_path: Path) -> None:
    check_free(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    with held(tmp_path / "run"):
        before = (tmp_path / "run" / "up.lock").read_bytes()
        with pytest.raises(ConfigError, match="in use by another `up`"):
            check_free(tmp_path / "run")
        assert (tmp_path / "run" / "up.lock").read_bytes() == before
    check_free(tmp_path / "run")


def test_what_a_server_reads_is_whole_and_private_and_outlives_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as folder:
        file = folder / "gateway.yaml"
        write_section(file, {"port": 1})
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        fill(folder)
        write_section(file, {"port": 1})
        with pytest.raises(OSError, match="No space"):
            write_section(file, {"port": 2, "text": "x" * 100_000})
        assert yaml.safe_load(file.read_text()) == {"port": 1}
        assert sorted(one.name for one in folder.iterdir()) == ["ballast", "gateway.yaml"]


def test_starts_that_wrote_nothing_push_out_no_earlier_log(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    for text in ("first", "second", ""):
        keep_earlier(log)
        log.write_text(text)
    for _ in range(5):
        keep_earlier(log)
    log.unlink()
    keep_earlier(log)
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {"gateway.log.1": "second", "gateway.log.2": "first"}
