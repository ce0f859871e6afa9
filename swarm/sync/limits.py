"""What a code archive may be: its bounds, and the names its entries may have.

Invariant: a name that passes :func:`check_name` denotes a place inside the folder it is extracted to, on every
operating system.
"""

from __future__ import annotations

from pydantic import Field

from swarm.errors import RequestError
from swarm.types import Model

MIB = 1024 * 1024
MAX_NAME_BYTES = 1024
_MAX_PART_BYTES, _MAX_PARTS = 255, 32


class ArchiveLimits(Model):
    """Bounds of one code archive; sizes in bytes. Training code is small: what is big is data and belongs elsewhere."""

    max_archive_bytes: int = Field(default=64 * MIB, ge=1024, description="the archive as it is sent")
    max_total_bytes: int = Field(default=256 * MIB, ge=1024, description="all files together, unpacked")
    max_file_bytes: int = Field(default=16 * MIB, ge=1024, description="one file, unpacked")
    max_files: int = Field(default=10_000, ge=1, le=60_000, description="files and folders")
    max_ratio: float = Field(default=200.0, gt=1, description="unpacked to packed size, of what is over 1 MiB unpacked")


def check_name(name: str) -> str:
    """What is wrong with ``name`` as the name of an entry (a folder's ends in ``/``); empty when nothing is."""
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
    if any(ord(char) < 32 or ord(char) == 127 for char in name):
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
    """The error of a server that does not take an archive; ``entry`` is at fault if it is one entry."""
    where = "the archive" if entry is None else f"the archive's entry {entry[:200]!r}"
    return RequestError(f"{where} is refused: {reason}", code="bad_archive", param=entry and entry[:200])
