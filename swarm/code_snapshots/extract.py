"""``check_and_extract``: unpack an untrusted archive, or refuse it with the name of the entry at fault.

Invariant: nothing is written outside the folder, or before the names, kinds and sizes of all entries are checked; a
folder that was not filled whole is removed.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import struct
import zipfile
import zlib
from pathlib import Path

from swarm.code_snapshots.manifest import BYTECODE, ArchiveLimits, check_name, fingerprint, refusal

#: Begins each entry of the directory of a zip.
_ENTRY_MARK = b"PK\x01\x02"


def check_and_extract(archive: bytes, folder: Path, limits: ArchiveLimits | None = None) -> dict[str, str]:
    """Extract ``archive`` into ``folder``, which is made for it; return the manifest of its files.

    Of a file's mode only the owner's executable bit is kept. Bytecode is left out: that of another Python would be
    imported in place of its source.

    Raises:
        RequestError: with code ``bad_archive``: not a zip, or an entry that may be dangerous: an absolute path or
            one that leads out of the folder, a link, a device, encrypted, a duplicate, or over the limits.
        OSError: the folder is there already, or cannot be written.
    """
    limits = limits or ArchiveLimits()
    if len(archive) > limits.max_archive_bytes:
        raise refusal(f"it has {len(archive)} bytes, at most {limits.max_archive_bytes} are accepted")
    # counted before the directory is read, which may be one of millions of entries
    if (count := archive.count(_ENTRY_MARK)) > limits.max_files:
        raise refusal(f"it has {count} entries, at most {limits.max_files} are accepted")
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as reader:
            entries = reader.infolist()
            _check_entries(entries, limits)
            folder.mkdir(parents=True)
            try:
                return _extract(reader, entries, str(folder))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as exc:
        raise refusal(f"it is not a readable zip: {exc}") from exc


def _check_entries(entries: list[zipfile.ZipInfo], limits: ArchiveLimits) -> None:
    total = 0
    for entry in entries:
        # zipfile cuts the name at a NUL; the name as it was sent counts
        name = entry.orig_filename
        if wrong := check_name(name) or _wrong(entry, limits):
            raise refusal(wrong, name)
        total += entry.file_size
        if total > limits.max_total_bytes:
            raise refusal(f"with it the files have more than {limits.max_total_bytes} bytes", name)


def _is_folder(entry: zipfile.ZipInfo) -> bool:
    return entry.orig_filename.endswith("/")


def _wrong(entry: zipfile.ZipInfo, limits: ArchiveLimits) -> str:
    """Why an entry of a good name is refused; empty if it is not."""
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"its compression method {entry.compress_type} is not supported; use deflate"
    if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "it is a symbolic link, a device, a pipe or a socket"
    if _is_folder(entry) and entry.file_size:
        return "it is a folder with contents of its own"
    if entry.file_size > limits.max_file_bytes:
        return f"it unpacks to {entry.file_size} bytes, at most {limits.max_file_bytes} are accepted"
    return ""


def _extract(reader: zipfile.ZipFile, entries: list[zipfile.ZipInfo], into: str) -> dict[str, str]:
    """Write all files below ``into``; return their manifest."""
    manifest: dict[str, str] = {}
    for entry in sorted(entries, key=lambda entry: entry.orig_filename):
        name = entry.orig_filename
        if BYTECODE in name.split("/"):
            continue
        executable = bool((entry.external_attr >> 16) & stat.S_IXUSR)
        try:
            os.makedirs(f"{into}/{name.rpartition('/')[0]}", exist_ok=True)
            if _is_folder(entry):
                continue
            content = _content(reader, entry)
            _write(f"{into}/{name}", content, executable)
            manifest[name] = fingerprint(content, executable)
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            NotImplementedError,
            OverflowError,  # of a zip64 entry that lies beyond 63 bits
            RuntimeError,
            struct.error,
        ) as exc:
            raise refusal(f"its contents are damaged: {exc}", name) from exc
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as exc:
            raise refusal("its name occurs twice, or as a file and as a folder", name) from exc
    if not manifest:
        raise refusal("there are no files in it")
    return manifest


def _content(reader: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    with reader.open(entry) as source:
        # with a number, so that no more is unpacked than the size in the directory, which was checked
        content = source.read(entry.file_size + 1)
    if len(content) != entry.file_size:
        raise zipfile.BadZipFile(f"{len(content)} bytes instead of {entry.file_size}")
    return content


def _write(path: str, content: bytes, executable: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755 if executable else 0o644)
    with open(descriptor, "wb") as writer:
        writer.write(content)
