"""What a code archive is: the limits of its files and their names, and its manifest with the digest that names it.

Invariant: two trees have the same digest exactly if they have the same files with the same contents and modes. Compiled
bytecode does not count: it appears wherever code is imported. On every operating system, a name that passes
:func:`check_name` is a path inside the target folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import Field

from swarm.errors import RequestError
from swarm.types import Model

MIB = 1024 * 1024
_MAX_NAME_BYTES = 1024
_MAX_PART_BYTES, _MAX_PARTS = 255, 32
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: Name of the folders of bytecode.
BYTECODE = "__pycache__"

#: File name (with ``/``) -> :func:`fingerprint`.
Manifest = Mapping[str, str]


class ArchiveLimits(Model):
    """Limits of one code archive; sizes in bytes. Training code is small: large files are data and belong elsewhere."""

    max_archive_bytes: int = Field(default=64 * MIB, ge=1024, description="the archive itself")
    max_total_bytes: int = Field(default=256 * MIB, ge=1024, description="all files together, unpacked")
    max_file_bytes: int = Field(default=16 * MIB, ge=1024, description="one file, unpacked")
    max_files: int = Field(default=10_000, ge=1, le=60_000, description="files and folders")


def check_name(name: str) -> str:
    """Why ``name`` is not valid for an entry (the name of a folder ends in ``/``); empty if it is valid."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "its name is not valid text"
    parts = name.removesuffix("/").split("/")
    if {"", ".", ".."} & {*parts}:
        return "its name is empty, absolute, or has an empty part, '.' or '..'"
    if "\\" in name or ":" in name:
        return "its name has a backslash or a colon, which mean folders and drives on some systems"
    if _CONTROL.search(name):
        return "its name has control characters"
    if len(encoded) > _MAX_NAME_BYTES or any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        return f"its name is longer than {_MAX_NAME_BYTES} bytes, or a part of it than {_MAX_PART_BYTES}"
    if len(parts) > _MAX_PARTS:
        return f"its name is more than {_MAX_PARTS} folders deep"
    return ""


def refusal(reason: str, entry: str | None = None) -> RequestError:
    """The error for an archive that is refused; ``entry``: the name of the entry at fault, if it is one."""
    where = "the archive" if entry is None else f"the archive's entry {entry[:200]!r}"
    return RequestError(f"{where} is refused: {reason}", code="bad_archive", param=entry and entry[:200])


def fingerprint(content: bytes, executable: bool) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits, with an ``x`` behind it if the file is executable."""
    return hashlib.sha256(content).hexdigest() + ("x" if executable else "")


def digest_of(manifest: Manifest) -> str:
    """The SHA-256 of a manifest, in hexadecimal digits."""
    lines = "".join(f"{name}\0{manifest[name]}\n" for name in sorted(manifest))
    return hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()


def manifest_of(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """The manifest of the files below ``folder``; of those among ``names`` only, if they are given.

    A name that is not there is left out.

    Raises:
        OSError: a file cannot be read.
    """
    fingerprints: dict[str, str] = {}
    for name in _files(folder) if names is None else names:
        try:
            with open(f"{folder}/{name}", "rb", buffering=0) as reader:
                executable = bool(os.fstat(reader.fileno()).st_mode & stat.S_IXUSR)
                fingerprints[name] = fingerprint(reader.read(), executable)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
    return fingerprints


def _files(folder: Path) -> Iterable[str]:
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != BYTECODE]
        yield from ((Path(path) / name).relative_to(folder).as_posix() for name in files)
