"""The folder of one run's Ray, to which ``run_dir/ray`` leads: who holds it, and its removal.

Invariant: a folder that a living engine holds is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

#: The beginning of the folder's name.
PREFIX = "swarm-ray-"


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
