"""The limits of a code archive, and the names that its entries may have.

Invariant: on every operating system, a name that passes :func:`check_name` is a path inside the target folder.
"""

from __future__ import annotations

import re

from pydantic import Field

from swarm.errors import RequestError
from swarm.types import Model

MIB = 1024 * 1024
MAX_NAME_BYTES = 1024
_MAX_PART_BYTES, _MAX_PARTS = 255, 32
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class ArchiveLimits(Model):
    """Limits of one code archive; sizes in bytes. Training code is small: large files are data and belong elsewhere."""

    max_archive_bytes: int = Field(default=64 * MIB, ge=1024, description="the archive itself")
    max_total_bytes: int = Field(default=256 * MIB, ge=1024, description="all files together, unpacked")
    max_file_bytes: int = Field(default=16 * MIB, ge=1024, description="one file, unpacked")
    max_files: int = Field(default=10_000, ge=1, le=60_000, description="files and folders")
    max_ratio: float = Field(default=200.0, gt=1, description="unpacked to packed size, from 1 MiB unpacked on")


def check_name(name: str) -> str:
    """Why ``name`` is not valid for an entry (the name of a folder ends in ``/``); empty if it is valid."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "its name is not valid text"
    path = name.removesuffix("/")
    parts = path.split("/")
    if not path:
        return "its name is empty or absolute"
    if name.startswith("/"):
        return "its name is an absolute path"
    if "\\" in name or ":" in name:
        return "its name has a backslash or a colon, which mean folders and drives on some systems"
    if _CONTROL.search(name):
        return "its name has control characters"
    if ".." in parts:
        return "its name leads out of the folder ('..')"
    if "." in parts or "" in parts:
        return "its name has an empty part or '.'"
    if len(encoded) > MAX_NAME_BYTES or any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        return f"its name is longer than {MAX_NAME_BYTES} bytes, or a part of it than {_MAX_PART_BYTES}"
    if len(parts) > _MAX_PARTS:
        return f"its name is more than {_MAX_PARTS} folders deep"
    return ""


def refusal(reason: str, entry: str | None = None) -> RequestError:
    """The error for an archive that is refused; ``entry``: the name of the entry at fault, if it is one."""
    where = "the archive" if entry is None else f"the archive's entry {entry[:200]!r}"
    return RequestError(f"{where} is refused: {reason}", code="bad_archive", param=entry and entry[:200])
