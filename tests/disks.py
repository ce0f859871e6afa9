"""Small disks that fill up, and device nodes that are full."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Generator[Path]:
    """A disk of its own at ``folder`` inside the block; the test is skipped where nothing may be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs mount(8)")
    if done.returncode:
        pytest.skip(f"needs a small disk, and none may be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # detached at once, even if a file of it is still open
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Use all of the disk of ``folder``; the file to delete for room."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        piece = 1 << 20
        while piece:
            try:
                file.write(b"\0" * piece)
            except OSError:
                piece //= 2
    return ballast
