"""Shared-memory segments of the processes of an engine run, by inode: which are in use, and which are left over.

Invariant: a segment that a living process maps or holds open is never removed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

#: where POSIX shared memory lives on Linux, and what vLLM, verl and multiprocessing call their segments
SHARED_MEMORY = Path("/dev/shm")
SEGMENT_PREFIXES = ("psm_", "verl_weights_", "sem.mp-", "torch_")


def held_segments(processes: Iterable[psutil.Process]) -> set[int]:
    """Inodes of the files under /dev/shm that ``processes`` map or hold open.

    Not their names: a semaphore is created under a name that is gone by the time it has its own.
    """
    prefix = f"{SHARED_MEMORY}/"
    inodes: set[int] = set()
    for process in processes:
        proc = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):
            for line in (proc / "maps").read_text(errors="replace").splitlines():
                if prefix in line:
                    inodes.add(int(line.split(maxsplit=5)[4]))
        with contextlib.suppress(OSError):
            for descriptor in (proc / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor).startswith(prefix):
                        inodes.add(descriptor.stat().st_ino)
    return inodes


def remove_segments(since: float, before: float = float("inf"), held: Iterable[int] = ()) -> None:
    """Unlink this user's segments that were created from ``since`` on and before ``before``, if nobody holds them.

    Args:
        since: epoch seconds; when the run began.
        before: epoch seconds; a segment just created may be another run's that is about to map it.
        held: inodes that processes of the run held when they were killed; removed whatever they are called.
    """
    if not SHARED_MEMORY.is_dir():
        return
    run = set(held)
    candidates: dict[Path, int] = {}
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(OSError):
            stat = path.stat()
            ours = stat.st_uid == os.getuid() and since <= stat.st_ctime < before
            if stat.st_ino in run or (ours and path.name.startswith(SEGMENT_PREFIXES)):
                candidates[path] = stat.st_ino
    if candidates:
        in_use = held_segments(psutil.process_iter())
        for path, inode in candidates.items():
            if inode not in in_use:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
