"""Files that are replaced as a whole, and what is on disk for sure.

Invariant: a file that is replaced is whole at any time; a kill, a full disk or a loss of power leaves it as it was.
"""

from __future__ import annotations

import os
from pathlib import Path


def beside(path: Path) -> Path:
    """The file in which the next content of ``path`` is written; a kill may leave it."""
    return path.with_name(f".{path.name}.partial")


def replace_file(path: Path, content: bytes) -> None:
    """Replace what ``path`` contains; only its owner reads it. Two writers of one file need a lock.

    Raises:
        OSError: it cannot be written; it is as it was.
    """
    partial = beside(path)
    try:
        partial.unlink(missing_ok=True)
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
