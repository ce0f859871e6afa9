"""Looks at the disks that a run writes to, and names a full one with what it holds and what to do.

Invariant: of each disk, each time that it becomes full and each time that it has room again is told once. Nothing here
stops anything: servers and engine wait, or lose a log, and go on by themselves.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gateway.launch.plan import UpPlan
from gateway.launch.watch import OnEvent
from swarm.checkpoints import checkpoint_folder
from swarm.errors import ConfigError
from swarm.files import SHARED_MEMORY, nearest

#: Free bytes below which a disk counts as full (a journal or a log needs some), and above which it has room again.
_LEAST, _ROOM = 4 * 1024**2, 8 * 1024**2
#: Folders in a run folder that may be disks of their own.
_INSIDE = {"logs": "logs", "code": "synced code", "refused": "records of refused requests", "history": "history"}


class DiskWatch:
    """Those of one ``up``.

    Args:
        plan: says where servers, engine and gateway write.
        on_event: called with ``disk_full`` and ``disk_free``, and their values.
    """

    def __init__(self, plan: UpPlan, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._disks = _disks(plan)
        self._full: set[Path] = set()

    def check(self) -> None:
        """Raise :class:`ConfigError` if nothing can be written now, before anything is started."""
        for path, what in self._disks.items():
            if _is_full(path, _LEAST):
                raise ConfigError(f"the disk of {path} is full: {what} could not be written; free some space there")

    def look(self) -> None:
        """Tell what has changed since the last look."""
        for path, what in self._disks.items():
            full = _is_full(path, _ROOM if path in self._full else _LEAST)
            if full is None or full == (path in self._full):
                continue
            (self._full.add if full else self._full.discard)(path)
            self._on_event("disk_full" if full else "disk_free", {"path": str(path), "holds": what})


def _disks(plan: UpPlan) -> Mapping[Path, str]:
    """A folder of each disk, and what is written there."""
    wanted: list[tuple[Path, str]] = []
    for server in plan.servers:
        wanted.append((server.run_dir, "journal and logs"))
        wanted.append((checkpoint_folder(server.job, server.run_dir), "checkpoints"))
        wanted += [(server.run_dir / name, what) for name, what in _INSIDE.items()]
    section = plan.gateway_section or {}
    if keys := section.get("keys_file"):
        wanted.append((Path(keys).parent, "the gateway's keys and its audit log"))
    if request_log := section.get("request_log"):
        wanted.append((Path(request_log["path"]).parent, "the request log"))
    wanted.append((Path(tempfile.gettempdir()), "the engine's temporary files"))
    wanted.append((SHARED_MEMORY, "shared memory of the engine"))
    by_disk: dict[int, tuple[Path, dict[str, None]]] = {}
    for path, what in wanted:
        _, uses = by_disk.setdefault(nearest(path).stat().st_dev, (path, {}))
        uses[what] = None
    return {path: ", ".join(uses) for path, uses in by_disk.values()}


def _is_full(path: Path, least: int) -> bool | None:
    """Whether its disk has less than ``least`` bytes free, or no file more; ``None`` if it does not tell."""
    try:
        disk = os.statvfs(nearest(path))
    except OSError:
        return None
    if not disk.f_blocks:
        # as of a tmpfs without a limit
        return None
    return disk.f_bavail * disk.f_frsize < least or (disk.f_files > 0 and disk.f_favail == 0)
