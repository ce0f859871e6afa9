"""What of /dev/shm is held by whom: the ground on which a run's leftovers are removed and others' are not."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from swarm.files import SHARED_MEMORY
from swarm.link import leftovers
from swarm.link.leftovers import held_segments, remove_segments


def inode(name: str) -> int:
    return (SHARED_MEMORY / name).stat().st_ino


@pytest.fixture
def prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    """What only this process calls its segments: one that nobody holds may be removed by any engine that ends beside
    this test, if it has a name of the usual ones."""
    own = f"test-{os.getpid()}-"
    monkeypatch.setattr(leftovers, "SEGMENT_PREFIXES", (*leftovers.SEGMENT_PREFIXES, own))
    return own


def test_a_mapped_segment_is_held_until_it_is_closed(prefix: str) -> None:
    segment = shared_memory.SharedMemory(f"{prefix}mapped", create=True, size=64)
    number = inode(segment.name)
    try:
        assert number in held_segments([psutil.Process()])
        assert number in held_segments(psutil.process_iter())
        segment.close()
        assert number not in held_segments([psutil.Process()])
    finally:
        segment.unlink()


def test_a_semaphore_is_held_although_its_mapping_has_another_name() -> None:
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    name = f"sem.{semaphore._semlock.name.lstrip('/')}"
    assert name not in Path("/proc/self/maps").read_text()
    assert inode(name) in held_segments([psutil.Process()])


def test_an_open_file_is_held() -> None:
    path = SHARED_MEMORY / f"swarm-test-{os.getpid()}"
    try:
        with path.open("w"):
            assert path.stat().st_ino in held_segments([psutil.Process()])
        assert path.stat().st_ino not in held_segments([psutil.Process()])
    finally:
        path.unlink()


def test_only_what_nobody_holds_of_this_run_is_removed(prefix: str) -> None:
    began = time.time() - 1.0
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    held = SHARED_MEMORY / f"sem.{semaphore._semlock.name.lstrip('/')}"
    segment = shared_memory.SharedMemory(create=True, size=64)
    mapped = SHARED_MEMORY / segment.name
    orphan, usual = SHARED_MEMORY / f"{prefix}orphan", SHARED_MEMORY / f"psm_orphan{os.getpid()}"
    unrelated, named = (SHARED_MEMORY / f"{name}{os.getpid()}" for name in ("other", "unusual"))
    try:
        for path in (orphan, usual, unrelated, named):
            path.write_bytes(b"x")
        remove_segments(time.time() + 60.0)
        remove_segments(began, before=began)
        assert orphan.exists(), "created before the run, or too late to be sure"
        remove_segments(began, held={named.stat().st_ino, mapped.stat().st_ino})
        assert not orphan.exists() and not usual.exists() and not named.exists()
        assert held.exists() and mapped.exists() and unrelated.exists()
    finally:
        segment.unlink()
        segment.close()
        for path in (orphan, usual, unrelated, named):
            path.unlink(missing_ok=True)
