"""What of /dev/shm is held by whom: the ground on which a run's leftovers are removed and others' are not."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import shared_memory
from pathlib import Path

import psutil

from swarm.server.process import SHARED_MEMORY, _segments_of


def inode(name: str) -> int:
    return (SHARED_MEMORY / name).stat().st_ino


def test_a_mapped_segment_is_held_until_it_is_closed() -> None:
    segment = shared_memory.SharedMemory(create=True, size=64)
    number = inode(segment.name)
    try:
        assert number in _segments_of([psutil.Process()])
        assert number in _segments_of(psutil.process_iter())
        segment.close()
        assert number not in _segments_of([psutil.Process()])
    finally:
        segment.unlink()


def test_a_semaphore_is_held_although_its_mapping_has_another_name() -> None:
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    name = f"sem.{semaphore._semlock.name.lstrip('/')}"
    assert name not in Path("/proc/self/maps").read_text()
    assert inode(name) in _segments_of([psutil.Process()])


def test_an_open_file_is_held() -> None:
    path = SHARED_MEMORY / f"swarm-test-{os.getpid()}"
    try:
        with path.open("w"):
            assert path.stat().st_ino in _segments_of([psutil.Process()])
        assert path.stat().st_ino not in _segments_of([psutil.Process()])
    finally:
        path.unlink()
