"""``build_archive``: the files of a folder that git tracks, as one zip.

Invariant: nothing travels but contents of tracked files, as they are in the work tree; equal files give equal bytes,
whenever and wherever they are packed; every archive built here is one that :func:`swarm.sync.check_and_extract` takes
within the same limits.
"""

from __future__ import annotations

import io
import logging
import os
import stat
import subprocess
import zipfile
from pathlib import Path
from typing import NamedTuple

from swarm.errors import ConfigError
from swarm.sync.limits import MIB, ArchiveLimits, check_name

logger = logging.getLogger(__name__)

#: zip's first day; a file's own date would make equal code look different
_EPOCH = (1980, 1, 1, 0, 0, 0)
_GIT_SECONDS = 60.0
_SUBMODULE = "160000"
_UNTRACKED, _IGNORED = "git does not track it", "git ignores it"


class CodeArchive(NamedTuple):
    """The bytes of a zip; and why what is not in it is left out, by name (a folder's ends in ``/``)."""

    content: bytes
    left_out: dict[str, str]


def build_archive(folder: str | os.PathLike[str], *, limits: ArchiveLimits | None = None) -> CodeArchive:
    """Pack the files below ``folder`` that git tracks there, changed ones as changed.

    Secrets, checkpoints and logs are what nobody adds to git: files that git ignores or does not track are left out,
    and so are submodules, files over ``limits.max_file_bytes`` and links to anything but a tracked file of the folder
    (others travel as the file that they lead to). The log says so.

    Raises:
        ConfigError: no such folder, none of git's, nothing tracked in it, a file that cannot be read or named, or more
            than the limits allow.
    """
    limits = limits or ArchiveLimits()
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"code to sync: there is no folder {root}")
    tracked, left_out = _tracked(root)
    found = _files(root, tracked, left_out, limits)
    _tell(root, left_out)
    if not found:
        raise ConfigError(f"code to sync: there is nothing to send in {root}: `git add` the code")
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
    return CodeArchive(buffer.getvalue(), left_out)


def _tracked(root: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the tracked files below ``root``, and what else is there with why it is left out."""
    # a file in conflict is listed once for each side
    entries = {name: entry for entry, _, name in (line.partition("\t") for line in _git(root, "--stage"))}
    left_out = {name: "it is a submodule" for name, entry in entries.items() if entry.startswith(_SUBMODULE)}
    others = ("--others", "--exclude-standard", "--directory")
    left_out |= dict.fromkeys(_git(root, *others), _UNTRACKED)
    left_out |= dict.fromkeys(_git(root, *others, "--ignored"), _IGNORED)
    return sorted(name for name in entries if name not in left_out), left_out


def _git(root: Path, *options: str) -> list[str]:
    """What ``git ls-files`` lists below ``root``.

    It runs no hook, no filter and no program of the checkout's configuration, and heeds no variable that names another
    repository.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(root), "ls-files", "-z", *options, "--", "."]
    try:
        done = subprocess.run(
            command,
            env={**environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except FileNotFoundError as exc:
        raise ConfigError("code to sync: git is not installed, and only files that it tracks are sent") from exc
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(f"code to sync: git did not list the files in {root} within {_GIT_SECONDS:g} s") from exc
    except subprocess.CalledProcessError as exc:
        reason = os.fsdecode(exc.stderr).strip()
        if "not a git repository" in reason:
            reason = (
                "it is in no git checkout, and only files that git tracks are sent, so that secrets and checkpoints "
                "stay: run `git init` in it and `git add` the code"
            )
        raise ConfigError(f"code to sync: {root}: {reason}") from exc
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _files(
    root: Path, tracked: list[str], left_out: dict[str, str], limits: ArchiveLimits
) -> list[tuple[str, Path, int]]:
    """Name in the archive, path and size of each file that goes into it; adds to ``left_out``."""
    inside = root.resolve()
    contents = {inside / name for name in tracked}
    found: list[tuple[str, Path, int]] = []
    for name in tracked:
        path = root / name
        try:
            resolved = path.resolve(strict=True)
            status = resolved.stat()
        except (OSError, RuntimeError) as exc:  # RuntimeError: a loop of links
            if path.is_symlink():
                left_out[name] = "it is a link to nothing"
            elif not isinstance(exc, (FileNotFoundError, NotADirectoryError)):
                raise ConfigError(f"code to sync: cannot read {path}: {exc}") from exc
            # else it is deleted
            continue
        if resolved not in contents:
            left_out[name] = "it leads to what is not tracked in this folder"
        elif not stat.S_ISREG(status.st_mode):
            left_out[name] = "it is no file"
        elif status.st_size > limits.max_file_bytes:
            left_out[name] = f"it has {status.st_size} bytes, more than {limits.max_file_bytes}"
        elif wrong := check_name(name):
            raise ConfigError(f"code to sync: {path!r} cannot be packed: {wrong}")
        else:
            found.append((name, resolved, status.st_size))
    return found


def _tell(root: Path, left_out: dict[str, str]) -> None:
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        level = logging.INFO if reason == _IGNORED else logging.WARNING
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        logger.log(
            level, "code to sync: in %s is left out, because %s: %s%s", root, reason, ", ".join(names[:10]), more
        )


def _check_size(root: Path, found: list[tuple[str, Path, int]], limits: ArchiveLimits) -> None:
    total = sum(size for _, _, size in found)
    if len(found) > limits.max_files:
        raise _too_large(root, found, f"they are {len(found)} files, at most {limits.max_files} are taken")
    if total > limits.max_total_bytes:
        raise _too_large(root, found, f"they are {total} bytes, at most {limits.max_total_bytes} are taken")


def _too_large(root: Path, found: list[tuple[str, Path, int]], why: str) -> ConfigError:
    largest = sorted(found, key=lambda one: one[2], reverse=True)[:3]
    names = ", ".join(f"{name} ({size} bytes)" for name, _, size in largest)
    return ConfigError(
        f"code to sync: the files in {root} are too much: {why}; sync a smaller folder, or take some out of git; the "
        f"largest are {names}"
    )


def _read(path: Path, limits: ArchiveLimits) -> tuple[bytes, bool]:
    try:
        with path.open("rb") as reader:
            executable = bool(os.fstat(reader.fileno()).st_mode & stat.S_IXUSR)
            content = reader.read(limits.max_file_bytes + 1)
    except OSError as exc:
        raise ConfigError(f"code to sync: cannot read {path}: {exc.strerror}") from exc
    if len(content) > limits.max_file_bytes:
        raise ConfigError(f"code to sync: {path} grows while it is packed")
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
        raise ConfigError(
            f"code to sync: {name} packs more than {limits.max_ratio:g}:1: it is no code, take it out of git"
        )
