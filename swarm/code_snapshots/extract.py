"""``check_and_extract``: unpack an untrusted archive, or refuse it with the name of the entry at fault.

Invariant: nothing is written outside the folder or before all entries are checked; a folder that was not filled whole
is removed.
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

from swarm.code_snapshots.manifest import BYTECODE, MAX_NAME_BYTES, MIB, ArchiveLimits, check_name, fingerprint, refusal

# the record at the end of every zip: signature, two disk numbers, entries here, entries, size, start, comment length
_END = struct.Struct("<4s4H2LH")
_END_MARK, _MOST_COMMENT = b"PK\x05\x06", 0xFFFF
_ZIP64_LOCATOR, _ZIP64_LOCATOR_SIZE = b"PK\x06\x07", 20
#: The most bytes of an entry in the central directory: its head, its name, and additions of tools.
_DIRECTORY_BYTES = 46 + MAX_NAME_BYTES + 256
_ENCRYPTED = 0x1 | 0x40 | 0x2000


def check_and_extract(archive: bytes, folder: Path, limits: ArchiveLimits | None = None) -> dict[str, str]:
    """Extract ``archive`` into ``folder``, which is made for it; return the manifest of its files.

    Of a file's mode only the owner's executable bit is kept. Bytecode is left out: that of another Python would be
    imported in place of its source.

    Raises:
        RequestError: with code ``bad_archive``: not a plain zip, or an entry that may be dangerous: an absolute path or
            one that leads out of the folder, a link, a device, encrypted, a duplicate, or over the limits.
        OSError: the folder is there already, or cannot be written.
    """
    limits = limits or ArchiveLimits()
    _check_frame(archive, limits)
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as reader:
            entries = reader.infolist()
            _check_entries(entries, len(archive), limits)
            folder.mkdir(parents=True)
            try:
                return _extract(reader, entries, str(folder))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as exc:
        raise refusal(f"it is not a readable zip: {exc}") from exc


def _check_frame(archive: bytes, limits: ArchiveLimits) -> None:
    """Limit the cost of reading the directory, before it is read."""
    if len(archive) > limits.max_archive_bytes:
        raise refusal(f"it has {len(archive)} bytes, at most {limits.max_archive_bytes} are accepted")
    # zipfile looks at the same place; `git archive` writes its commit as the comment behind it
    end_at = archive.rfind(_END_MARK, max(0, len(archive) - _END.size - _MOST_COMMENT))
    if len(archive) < _END.size or not archive.startswith((b"PK\x03\x04", _END_MARK)):
        raise refusal("it is not a zip")
    if end_at < 0 or end_at + _END.size > len(archive):
        raise refusal("it is not a plain zip: it is cut off, or has other data at its end")
    _, disk, directory_disk, here, entries, size, _, comment = _END.unpack_from(archive, end_at)
    if end_at + _END.size + comment != len(archive):
        raise refusal("it is not a plain zip: it is cut off, or has other data at its end")
    locator_at = max(0, end_at - _ZIP64_LOCATOR_SIZE)
    if archive[locator_at : locator_at + 4] == _ZIP64_LOCATOR or disk or directory_disk or here != entries:
        raise refusal("it is not a plain zip: it is in zip64 format or in several parts")
    if not entries:
        raise refusal("it is empty")
    if entries > limits.max_files or size > limits.max_files * _DIRECTORY_BYTES:
        raise refusal(f"it has {entries} entries, at most {limits.max_files} are accepted")


def _check_entries(entries: list[zipfile.ZipInfo], packed: int, limits: ArchiveLimits) -> None:
    if len(entries) > limits.max_files:
        raise refusal(f"it has {len(entries)} entries, at most {limits.max_files} are accepted")
    names: set[str] = set()
    folders: set[str] = set()
    total = 0
    for entry in entries:
        # zipfile cuts the name at a NUL; the name as it was sent counts
        name = entry.orig_filename
        if wrong := check_name(name) or _check_kind(entry) or _check_size(entry, limits):
            raise refusal(wrong, name)
        path = name.removesuffix("/")
        above = {path[:at] for at, char in enumerate(path) if char == "/"}
        if name in names or (path in folders and not _is_folder(entry)) or above & names or path in names:
            raise refusal("its name occurs twice, or as a file and as a folder", name)
        names.add(name)
        folders |= above | ({path} if _is_folder(entry) else set())
        total += entry.file_size
        if total > limits.max_total_bytes:
            raise refusal(f"with it the files have more than {limits.max_total_bytes} bytes", name)
    if total > MIB and total > limits.max_ratio * packed:
        # entries that share their packed bytes pass the check of each entry
        raise refusal(f"it unpacks to {total} bytes, more than {limits.max_ratio:g} times its size")


def _is_folder(entry: zipfile.ZipInfo) -> bool:
    return entry.orig_filename.endswith("/")


def _check_kind(entry: zipfile.ZipInfo) -> str:
    if entry.flag_bits & _ENCRYPTED:
        return "it is encrypted"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"its compression method {entry.compress_type} is not supported; use deflate"
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return "it is a symbolic link"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "it is a device, a pipe or a socket"
    if kind and (kind == stat.S_IFDIR) != _is_folder(entry):
        return "its name and its mode disagree on whether it is a folder"
    return ""


def _check_size(entry: zipfile.ZipInfo, limits: ArchiveLimits) -> str:
    size = entry.file_size
    if _is_folder(entry) and size:
        return "it is a folder with contents of its own"
    if size > limits.max_file_bytes:
        return f"it unpacks to {size} bytes, at most {limits.max_file_bytes} are accepted"
    if size > MIB and size > limits.max_ratio * entry.compress_size:
        return f"it unpacks to {size} bytes, more than {limits.max_ratio:g} times its packed size"
    return ""


def _extract(reader: zipfile.ZipFile, entries: list[zipfile.ZipInfo], into: str) -> dict[str, str]:
    """Write all files below ``into``; return their manifest."""
    manifest: dict[str, str] = {}
    made: set[str] = set()
    for entry in sorted(entries, key=lambda entry: entry.orig_filename):
        name = entry.orig_filename
        if BYTECODE in name.split("/"):
            continue
        executable = bool((entry.external_attr >> 16) & stat.S_IXUSR)
        try:
            if (folder := name.rpartition("/")[0]) not in made:
                os.makedirs(f"{into}/{folder}", exist_ok=True)
                made.add(folder)
            if _is_folder(entry):
                continue
            content = _content(reader, entry)
            _write(f"{into}/{name}", content, executable)
            manifest[name] = fingerprint(content, executable)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error) as exc:
            raise refusal(f"its contents are damaged: {exc}", name) from exc
        except FileExistsError:
            raise refusal("its name differs from another entry's only in ways that this system ignores", name) from None
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
    with open(descriptor, "wb", buffering=0) as writer:
        rest = memoryview(content)
        while rest:
            rest = rest[writer.write(rest) :]
