"""``build_archive``: a folder of training code as one zip.

Invariant: equal files give equal bytes, whenever and wherever they are packed; every archive built here is one that
:func:`swarm.sync.check_and_extract` takes within the same limits.
"""

from __future__ import annotations

import io
import logging
import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from swarm.errors import ConfigError
from swarm.sync.limits import MIB, ArchiveLimits, check_name

logger = logging.getLogger(__name__)

#: Never packed, by name, at any depth. Folders with a ``pyvenv.cfg`` (virtual environments) are left out as well.
DEFAULT_EXCLUDES = (
    ".git", ".hg", ".svn", "__pycache__", "*.pyc", "node_modules", ".venv", "venv", ".tox", ".nox", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".hypothesis", ".ipynb_checkpoints", ".DS_Store", ".idea", ".vscode", ".env",
)  # fmt: skip

#: zip's first day; a file's own date would make equal code look different
_EPOCH = (1980, 1, 1, 0, 0, 0)


def build_archive(
    folder: str | os.PathLike[str], *, exclude: Sequence[str] = (), limits: ArchiveLimits | None = None
) -> bytes:
    """The files below ``folder`` as the bytes of a zip.

    Files over ``limits.max_file_bytes``, links that lead out of the folder, links to folders, and what is no file are
    left out, each with a warning in the log.

    Args:
        exclude: shell patterns of names (``"*.ckpt"``) or of paths from the folder (``"data/raw"``) to leave out, in
            addition to :data:`DEFAULT_EXCLUDES`.

    Raises:
        ConfigError: no such folder, nothing in it, a file that cannot be read or named, or more than the limits allow.
    """
    limits = limits or ArchiveLimits()
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"code to sync: there is no folder {root}")
    found = sorted(_files(root, (*DEFAULT_EXCLUDES, *exclude), limits))
    if not found:
        raise ConfigError(f"code to sync: there are no files in {root}")
    _check_size(root, found, limits)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as writer:
        for name, path, _ in found:
            content, executable = _read(path, limits)
            _write(writer, name, content, executable, limits)
    if buffer.tell() > limits.max_archive_bytes:
        raise _too_large(root, found, f"packed they are {buffer.tell()} bytes, at most {limits.max_archive_bytes}")
    total = sum(size for _, _, size in found)
    if total > MIB and total > limits.max_ratio * buffer.tell():
        raise _too_large(root, found, f"they pack more than {limits.max_ratio:g}:1, which no code does")
    return buffer.getvalue()


def _files(root: Path, exclude: Sequence[str], limits: ArchiveLimits) -> Iterator[tuple[str, Path, int]]:
    """Name in the archive, path and size of each file."""
    inside = root.resolve()

    def refuse(error: OSError) -> None:
        raise ConfigError(f"code to sync: cannot read {error.filename}: {error.strerror}") from error

    for where, folders, files in os.walk(root, onerror=refuse):
        here = Path(where)
        folders[:] = [name for name in sorted(folders) if _wanted_folder(here / name, root, exclude)]
        for file in files:
            path = here / file
            name = path.relative_to(root).as_posix()
            if _excluded(name, exclude) or (size := _size(path, inside, limits)) is None:
                continue
            if wrong := check_name(name):
                raise ConfigError(f"code to sync: {path!r} cannot be packed: {wrong}")
            yield name, path, size


def _wanted_folder(path: Path, root: Path, exclude: Sequence[str]) -> bool:
    if _excluded(path.relative_to(root).as_posix(), exclude) or (path / "pyvenv.cfg").exists():
        return False
    if path.is_symlink():
        logger.warning("code to sync: %s is left out: it is a link to a folder", path)
        return False
    return True


def _excluded(name: str, patterns: Sequence[str]) -> bool:
    last = name.rpartition("/")[2]
    return any(fnmatchcase(name, pattern) or fnmatchcase(last, pattern) for pattern in patterns)


def _size(path: Path, inside: Path, limits: ArchiveLimits) -> int | None:
    """The file's size; None (and a warning) if it does not go into an archive."""
    try:
        found = path.stat()
        leads_out = path.is_symlink() and not path.resolve().is_relative_to(inside)
    except OSError as exc:
        logger.warning("code to sync: %s is left out: %s", path, exc.strerror)
        return None
    if leads_out:
        why = "it is a link that leads out of the folder"
    elif not stat.S_ISREG(found.st_mode):
        why = "it is no file"
    elif found.st_size > limits.max_file_bytes:
        why = f"it has {found.st_size} bytes, more than {limits.max_file_bytes}"
    else:
        return found.st_size
    logger.warning("code to sync: %s is left out: %s", path, why)
    return None


def _check_size(root: Path, found: list[tuple[str, Path, int]], limits: ArchiveLimits) -> None:
    total = sum(size for _, _, size in found)
    if len(found) > limits.max_files:
        raise _too_large(root, found, f"they are {len(found)} files, at most {limits.max_files} are taken")
    if total > limits.max_total_bytes:
        raise _too_large(root, found, f"they are {total} bytes, at most {limits.max_total_bytes} are taken")


def _too_large(root: Path, found: list[tuple[str, Path, int]], why: str) -> ConfigError:
    largest = sorted(found, key=lambda one: one[2], reverse=True)[:3]
    names = ", ".join(f"{name} ({size} bytes)" for name, _, size in largest)
    return ConfigError(f"code to sync: the files in {root} are too much: {why}; exclude some, the largest are {names}")


def _read(path: Path, limits: ArchiveLimits) -> tuple[bytes, bool]:
    try:
        with path.open("rb") as reader:
            executable = bool(os.fstat(reader.fileno()).st_mode & stat.S_IXUSR)
            content = reader.read(limits.max_file_bytes + 1)
    except OSError as exc:
        raise ConfigError(f"code to sync: cannot read {path}: {exc.strerror}") from exc
    if len(content) > limits.max_file_bytes:
        raise ConfigError(f"code to sync: {path} grows while it is packed; exclude it")
    return content, executable


def _write(writer: zipfile.ZipFile, name: str, content: bytes, executable: bool, limits: ArchiveLimits) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    # "made on Unix" wherever it is made: so the bytes are equal and the mode counts
    info.create_system = 3
    info.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    writer.writestr(info, content)
    if len(content) > MIB and len(content) > limits.max_ratio * info.compress_size:
        # megabytes of zeros look like a bomb to whoever unpacks them
        raise ConfigError(f"code to sync: {name} packs more than {limits.max_ratio:g}:1; exclude it, it is no code")
