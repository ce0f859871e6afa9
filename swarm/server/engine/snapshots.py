"""The training code that clients have sent: ``run_dir/code``, one folder per content, and which of them engines use.

Invariant: the selected snapshot is whole, stays on disk while it is selected, and is the same after a restart; of the
others only the latest are kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from swarm.sync import ArchiveLimits, check_and_extract
from swarm.sync.extract import PARTIAL

KEPT = 5
_NAME = re.compile(r"[0-9a-f]{64}")


class Snapshots:
    """Not for several callers at once; all of it blocks on the disk."""

    def __init__(self, run_dir: Path, limits: ArchiveLimits | None = None) -> None:
        self._folder = run_dir.resolve() / "code"
        self._selected = self._folder / "selected"
        self.limits = limits or ArchiveLimits()

    def add(self, archive: bytes) -> Path:
        """Extract ``archive``; the folder is used by no one yet.

        Raises:
            RequestError: the archive is refused, see :func:`swarm.sync.check_and_extract`.
            OSError: the disk is full, or the run folder cannot be written.
        """
        with contextlib.suppress(FileNotFoundError):
            for left in self._folder.glob(f"{PARTIAL}*"):
                # of a server that was killed meanwhile
                shutil.rmtree(left, ignore_errors=True)
        return check_and_extract(archive, self._folder, self.limits)

    def select(self, snapshot: Path) -> None:
        """Let engines that start from now on import from ``snapshot`` first, and forget the oldest others."""
        partial = self._folder / f"{PARTIAL}{secrets.token_hex(8)}"
        partial.write_text(snapshot.name)
        partial.replace(self._selected)
        os.utime(snapshot)
        others = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        for old in sorted(others, key=lambda path: path.stat().st_mtime_ns, reverse=True)[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)

    def selected(self) -> Path | None:
        """The folder that engines import from first; None before any was sent.

        Raises:
            FileNotFoundError: somebody removed it.
        """
        try:
            name = self._selected.read_text().strip()
        except FileNotFoundError:
            return None
        folder = self._folder / name
        if not _NAME.fullmatch(name) or not folder.is_dir():
            raise FileNotFoundError(f"the synced code is gone from {self._folder}: POST /sync_train_code again")
        return folder
