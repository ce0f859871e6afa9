"""Files that are replaced as a whole, and what is on disk for sure.

Invariant: a file that is replaced is whole at any time; a kill, a full disk or a loss of power leaves it as it was.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from contextlib import suppress
from pathlib import Path

#: Where POSIX shared memory lives on Linux.
SHARED_MEMORY = Path("/dev/shm")


def beside(path: Path) -> Path:
    """The file in which the next content of ``path`` is written; a kill may leave it."""
    return path.with_name(f".{path.name}.partial")


def give(descriptor: int, path: Path) -> None:
    """Let what root has made for ``path`` belong to the owner of the file that is there, else to that of the folder,
    whose server is to read it."""
    if os.geteuid() == 0:
        with suppress(OSError):
            owner = (path if path.exists() else path.parent).stat()
            os.fchown(descriptor, owner.st_uid, owner.st_gid)


def replace_file(path: Path, content: bytes, *, keeps_owner: bool = False) -> None:
    """Replace what ``path`` contains; only its owner reads it. Two writers of one file need a lock.

    Args:
        keeps_owner: what root writes is given as :func:`give` says.

    Raises:
        OSError: it cannot be written; it is as it was.
    """
    partial = beside(path)
    try:
        partial.unlink(missing_ok=True)
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            if keeps_owner:
                give(file.fileno(), path)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def append_line(path: Path, line: bytes, *, durable: bool = True, keeps_owner: bool = False) -> None:
    """Append ``line``, which ends with a line break, to a file that only its owner reads; ``durable``: it is on disk
    when this returns; ``keeps_owner``: what root begins is given as :func:`give` says. A line that a full disk or a
    kill cut off before harms it not.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if keeps_owner and not size:
            give(descriptor, path.parent)
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    return next(above for above in (path, *path.parents) if above.exists())


def free_bytes(path: Path) -> float:
    """Of the disk of ``path``, which need not be there; infinite where all of its numbers are 0, as those of a tmpfs
    without a limit (``podman run --shm-size 0``) and of some network file systems."""
    disk = shutil.disk_usage(nearest(path))
    return disk.free if disk.total else math.inf


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk; Windows opens no folder."""
    if not hasattr(os, "O_DIRECTORY") and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
