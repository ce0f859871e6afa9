"""What an engine leaves behind on its machine: the folder of its Ray, to which ``run_dir/ray`` leads, and its
shared-memory segments, by inode.

Invariant: a folder that a living engine holds, or a segment that a living process maps or holds open, is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import psutil

from swarm.files import SHARED_MEMORY

#: The beginning of the name of Ray's folder.
PREFIX = "swarm-ray-"
#: What vLLM, verl and multiprocessing call their segments.
SEGMENT_PREFIXES = ("psm_", "verl_weights_", "sem.mp-", "torch_")


def hold(folder: Path) -> int | None:
    """A descriptor that holds ``folder`` for as long as it is open; ``None`` if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_ray_folder(link: Path) -> None:
    """Remove ``link`` and the folder to which it leads; leave both while somebody holds the folder: in a copy of a run
    folder the link leads to that of the other run."""
    if not link.is_symlink():
        shutil.rmtree(link, ignore_errors=True)
        return
    folder = link.parent / link.readlink()
    with contextlib.suppress(OSError):
        # never anything but such a folder, whatever somebody made the link lead to
        if folder.name.startswith(PREFIX) and folder.is_dir():
            if (descriptor := hold(folder)) is None:
                return
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
    with contextlib.suppress(OSError):
        link.unlink(missing_ok=True)


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
