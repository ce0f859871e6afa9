"""A disk that fills up under ``up``: it is named with what to do, users are answered all the while, and training goes
on by itself once there is room. Real servers, the stand-in engine; needs the right to mount.
"""

from __future__ import annotations

import io
import subprocess
import time
import zipfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.disks import fill, small_disk
from tests.gateway.conftest import write_hooks
from tests.gateway.resilience.rig import REWARD
from tests.kill.up import ENGINE_VARIABLE
from tests.standins.engine import FOLDER_VARIABLE
from tests.up_process import COMMAND, Up, Users

pytestmark = pytest.mark.slow
_READY, _NAMED, _SOON = 120.0, 60.0, 90.0
_KEY = "sk-user"


def write(folder: Path) -> Path:
    """The file of ``up``."""
    (folder / "stand-in").mkdir()
    (folder / "stand-in" / "config.json").write_text("{}")
    write_hooks(folder / "hooks", REWARD)
    path = folder / "up.yaml"
    job = {
        "model": "stand-in",
        "batch_size": 3,
        "num_repeat": 2,
        "max_parallel_episodes": 16,
        "max_staleness": 5,
        "save_freq": 1,
        "serving": "always",
    }
    gateway = {
        "hooks": "hooks",
        "port": 0,
        "request_log": {"path": "requests/log.jsonl"},
        "keys_file": "keys/keys.json",
        "api_keys": [_KEY],
        "submit_timeout_seconds": 10.0,
    }
    swarm = {"run_dir": "run", "port": 0, "allow_code_sync": True}
    path.write_text(yaml.safe_dump({"job": job, "swarm": swarm, "gateway": gateway}))
    return path


@contextmanager
def running(folder: Path, prefix: tuple[str, ...] = (), **env: str) -> Generator[tuple[Up, Users]]:
    """``up`` with users."""
    command = (*prefix, *COMMAND[:-1], "tests.kill.up")
    up = Up(write(folder), command, {FOLDER_VARIABLE: str(folder), ENGINE_VARIABLE: "paced", **env})
    try:
        up.expect("ready", _READY)
        with Users(f"{up.url('gateway')}/v1", key=_KEY) as users:
            up.expect("step", _SOON)
            yield up, users
        assert up.interrupt() == 0
        assert not up.processes()
    finally:
        up.end()


@contextmanager
def going(folder: Path, place: str, **env: str) -> Generator[tuple[Up, Users, Path]]:
    """The same with a small disk at ``place``."""
    with small_disk(folder / place, 24) as disk, running(folder, **env) as (up, users):
        yield up, users, disk


def check(up: Up, users: Users, disk: Path, told_as: Path, holds: str, *, journal: bool = False) -> None:
    """Fill ``disk``, see it named, have users answered, make room, and see training go on."""
    ballast = fill(disk)
    began = time.monotonic()
    told = up.expect("disk_full", _NAMED)
    named = time.monotonic() - began
    assert told["path"] == str(told_as) and holds in told["holds"]
    users.wait(30, _SOON)
    # the server may have told of it before `up` looked at the disk
    if journal and not any("cannot be written" in one.get("message", "") for one in up.seen):
        up.expect("warning", _NAMED, saying="cannot be written")
    ballast.unlink()
    assert up.expect("disk_free", _NAMED)["path"] == str(told_as)
    # the batch whose step is reported may be one of before
    for _ in range(3):
        up.expect("step", _SOON)
    users.wait(10, _SOON)
    assert not [one for one in users.answers if one.status != 200], "users were answered all the while"
    slowest = max(one.seconds for one in users.answers)
    print(f"{told_as}: named after {named:.1f} s; {len(users.answers)} answers, the slowest after {slowest:.1f} s")


#: Folders that may be disks of their own, and what each holds.
_HOLDS = {
    "run/logs": "logs",
    "run/checkpoints": "checkpoints",
    "run/code": "synced code",
    "run/refused": "records of refused requests",
    "run/history": "history",
    "requests": "the request log",
    "keys": "the gateway's keys and its audit log",
    "tmp": "the engine's temporary files",
}


def test_it_is_named_at_once_users_are_answered_and_training_goes_on(tmp_path: Path) -> None:
    with going(tmp_path, "run") as (up, users, disk):
        check(up, users, disk, disk, "journal and logs", journal=True)


def test_so_is_each_disk_of_its_own(tmp_path: Path) -> None:
    with ExitStack() as stack:
        disks = {place: stack.enter_context(small_disk(tmp_path / place, 24)) for place in _HOLDS}
        with running(tmp_path, TMPDIR=str(tmp_path / "tmp")) as (up, users):
            for place, disk in disks.items():
                check(up, users, disk, disk, _HOLDS[place])


def test_full_shared_memory_is_named_too(tmp_path: Path) -> None:
    # a namespace of its own, or all tests of this machine would lack it
    prefix = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=24m tmpfs /dev/shm && exec "$@"', "sh")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    with running(tmp_path, prefix) as (up, users):
        shared = Path("/dev/shm")
        check(up, users, Path(f"/proc/{up.process.pid}/root/dev/shm"), shared, "shared memory of the engine")


def test_synced_code_that_finds_no_room_is_refused_with_the_reason_and_taken_later(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("mine.py", "x = 1\n" * 1000)
    with going(tmp_path, "run/code") as (up, users, disk):
        server = up.url("swarm server")

        def send() -> httpx.Response:
            url = f"{server}/sync_train_code?force_restart=1"
            return httpx.post(
                url,
                content=packed.getvalue(),
                headers={"content-type": "application/zip"},
                timeout=120,
                trust_env=False,
            )

        ballast = fill(disk)
        up.expect("disk_full", _NAMED)
        refused = send()
        assert refused.status_code >= 400 and "No space left" in refused.text, refused.text
        assert not [path for path in disk.iterdir() if path != ballast], "no part of it is left"
        users.wait(10, _SOON)
        ballast.unlink()
        assert send().status_code != refused.status_code


def test_a_gateway_that_dies_while_the_disk_is_full_comes_back(tmp_path: Path) -> None:
    with going(tmp_path, "run") as (up, users, disk):
        ballast = fill(disk)
        up.expect("disk_full", _NAMED)
        up.child("serve").kill()
        up.expect("gateway_recovered", _SOON)
        before = len(users.answers)
        users.wait(20, _SOON)
        assert [one for one in users.answers[before + 3 :] if one.status == 200], users.answers[before:]
        ballast.unlink()
        up.expect("step", _SOON)


def test_a_start_on_a_full_disk_says_so_and_touches_nothing(tmp_path: Path) -> None:
    path = write(tmp_path)
    with small_disk(tmp_path / "run", 24) as disk:
        fill(disk)
        up = Up(path, (*COMMAND[:-1], "tests.kill.up"), {FOLDER_VARIABLE: str(tmp_path), ENGINE_VARIABLE: "paced"})
        try:
            assert up.process.wait(_READY) == 2
        finally:
            up.end()
        events: list[dict[str, Any]] = []
        while (event := up.next()) is not None:
            events.append(event)
        assert any(f"the disk of {disk} is full" in one.get("line", "") for one in events), events
        assert [one.name for one in disk.iterdir()] == ["ballast"]
