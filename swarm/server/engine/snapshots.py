"""The training code that clients have sent: ``run_dir/code``, a folder for each sync, and which of them engines use.

Invariant: a snapshot appears whole or not at all, and is never written again. The selected one stays on disk, and is
the same after a restart; of the others only the latest are kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import ValidationError

from swarm.code_snapshots import ArchiveLimits, check_and_extract
from swarm.code_snapshots.manifest import digest_of, manifest_of
from swarm.control_protocol import CodeSnapshot
from swarm.errors import ConflictError, NotFoundError
from swarm.files import replace_file
from swarm.link.imported import ABOUT
from swarm.types import Model

#: snapshots that stay beside the selected one
KEPT = 10
#: begins the names of folders that are not complete yet, or no longer
PARTIAL = ".partial-"
#: in the folder of a snapshot: its files
FILES = "files"
_NAME = re.compile(r"\d{8}_\d{6}_\d{6}-[0-9a-f]{16}")
#: The time in such a name, in UTC.
_TIME = "%Y%m%d_%H%M%S_%f"


class Stored(Model):
    """A snapshot and the manifest of its files, as ``about.json`` has them."""

    about: CodeSnapshot
    files: dict[str, str]

    @property
    def id(self) -> str:
        return self.about.id

    @property
    def digest(self) -> str:
        return self.about.digest


class Snapshots:
    """Not for several callers at once; all of it blocks on the disk."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir.resolve() / "code"
        self._selected = self._folder / "selected"
        self.limits = ArchiveLimits()

    def add(self, archive: bytes, **sent: str) -> Stored:
        """Extract ``archive`` as a new snapshot, which is used by no one yet; ``sent`` is what its client says of it:
        fields of a :class:`CodeSnapshot`.

        Returns:
            The new one; or the selected one where that has the same code.

        Raises:
            RequestError: the archive is refused, see :func:`swarm.code_snapshots.check_and_extract`.
            OSError: the disk is full, or the run folder cannot be written.
        """
        with contextlib.suppress(FileNotFoundError):
            for left in self._folder.glob(f"{PARTIAL}*"):
                # of a server that was killed meanwhile
                shutil.rmtree(left, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=self._folder))
        try:
            files = check_and_extract(archive, partial / FILES, self.limits)
            digest, now = digest_of(files), datetime.now(UTC)
            with contextlib.suppress(FileNotFoundError):
                if (old := self.selected()) is not None and old.digest == digest and self._is_whole(old):
                    return old
            # names give the order, also where the clock was ahead when an earlier one came
            earlier = (datetime.strptime(stored.id.partition("-")[0], _TIME) for stored in self.all())
            named = max([now.replace(tzinfo=None), *(time + timedelta(microseconds=1) for time in earlier)])
            about = CodeSnapshot(
                id=f"{named.strftime(_TIME)}-{digest[:16]}",
                digest=digest,
                created=now.timestamp(),
                files=len(files),
                bytes=sum(os.stat(f"{partial}/{FILES}/{name}").st_size for name in files),
                **sent,
            )
            new = Stored(about=about, files=files)
            (partial / ABOUT).write_bytes(new.model_dump_json().encode())
            partial.chmod(0o755)
            partial.rename(self._folder / new.id)
            return new
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def check(self, snapshot: Stored) -> None:
        """Raise :class:`ConflictError` if the files are not what was sent any more."""
        if not self._is_whole(snapshot):
            raise ConflictError(f"the files of {snapshot.id} were changed on the server: sync that code again")

    def select(self, snapshot: str | None) -> None:
        """Let engines that start from now on import from this snapshot first, or from none; forget the oldest others.

        It was just added, or passed :meth:`check`.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        # else a loss of power may leave an empty file, which selects the server's own code
        replace_file(self._selected, (snapshot or "").encode())
        others = [stored.id for stored in self.all() if stored.id != snapshot]
        for old in others[: max(0, len(others) - KEPT)]:
            self.forget(old)

    def forget(self, snapshot: str) -> None:
        """Remove a snapshot that is not selected."""
        # as one step, so that a snapshot is never there in part
        gone = (self._folder / snapshot).rename(self._folder / f"{PARTIAL}{snapshot}")
        shutil.rmtree(gone, ignore_errors=True)

    def selected(self) -> Stored | None:
        """What engines import first; None if that is nothing.

        Raises:
            FileNotFoundError: somebody removed it.
        """
        try:
            name = self._selected.read_text().strip()
        except FileNotFoundError:
            return None
        if not name:
            return None
        try:
            return self.named(name)
        except NotFoundError as exc:
            raise FileNotFoundError(f"the synced code is gone from {self._folder}: sync it again") from exc

    def named(self, snapshot: str) -> Stored:
        """The snapshot of this name.

        Raises:
            NotFoundError: there is none.
        """
        try:
            if _NAME.fullmatch(snapshot) and (self.files(snapshot)).is_dir():
                return Stored.model_validate_json((self._folder / snapshot / ABOUT).read_bytes())
        except (OSError, ValidationError):
            pass
        raise NotFoundError(f"there is no code snapshot {snapshot[:80]!r} on this server", code="no_snapshot")

    def files(self, snapshot: str) -> Path:
        """The folder of its files."""
        return self._folder / snapshot / FILES

    def all(self) -> list[Stored]:
        """All, oldest first."""
        snapshots: list[Stored] = []
        for name in sorted(os.listdir(self._folder)) if self._folder.is_dir() else []:
            with contextlib.suppress(NotFoundError):
                snapshots.append(self.named(name))
        return snapshots

    def _is_whole(self, snapshot: Stored) -> bool:
        return digest_of(manifest_of(self.files(snapshot.id), snapshot.files)) == snapshot.digest
