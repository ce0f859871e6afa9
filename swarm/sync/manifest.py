"""The manifest of a tree of code: its files with their contents and modes; and the digest that names it.

Invariant: two trees have the same digest exactly if they have the same files with the same contents and modes. Compiled
bytecode does not count: it appears wherever code is imported.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

#: Name of the folders of bytecode.
BYTECODE = "__pycache__"

#: File name (with ``/``) -> :func:`fingerprint`.
Manifest = Mapping[str, str]


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
    found: dict[str, str] = {}
    for name in _files(folder) if names is None else names:
        try:
            with open(f"{folder}/{name}", "rb", buffering=0) as reader:
                executable = bool(os.fstat(reader.fileno()).st_mode & stat.S_IXUSR)
                found[name] = fingerprint(reader.read(), executable)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
    return found


def _files(folder: Path) -> Iterable[str]:
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != BYTECODE]
        yield from ((Path(path) / name).relative_to(folder).as_posix() for name in files)
