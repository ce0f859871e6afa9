"""``build_archive``: pack the files of a folder that git tracks into one zip.

Invariant: an archive holds only contents of tracked files, as they are in the work tree; equal files give equal bytes
on every machine; :func:`~swarm.code_snapshots.check_and_extract` accepts each archive that is built here within the
same limits.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import stat
import subprocess
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from swarm.code_snapshots.manifest import BYTECODE, ArchiveLimits, check_name, digest_of, fingerprint
from swarm.errors import ConfigError

logger = logging.getLogger(__name__)

#: zip's first day; a file's own date would make equal code look different
_EPOCH = (1980, 1, 1, 0, 0, 0)
_GIT_SECONDS = 60.0
_SUBMODULE, _LINK, _EXECUTABLE = "160000", "120000", "100755"
_UNTRACKED, _IGNORED = "git does not track it", "git ignores it"
_NOT_NAMED = "it is none of the named packages"
#: Name in the archive, path, size, and whether it is executable.
_File = tuple[str, str, int, bool]


class CodeArchive(NamedTuple):
    """A zip of code.

    Attributes:
        content: its bytes.
        left_out: the files that are not in it, with the reason; the name of a folder ends in ``/``.
        manifest: the files in it.
        revision: the commit that the checkout is at, with ``+changes`` if the files differ from it; empty before the
            first commit.
    """

    content: bytes
    left_out: dict[str, str]
    manifest: dict[str, str]
    revision: str

    @property
    def digest(self) -> str:
        """Of the files, see :func:`swarm.code_snapshots.manifest.digest_of`."""
        return digest_of(self.manifest)


def build_archive(
    folder: str | os.PathLike[str], *, packages: Collection[str] = (), limits: ArchiveLimits | None = None
) -> CodeArchive:
    """Pack the files below ``folder`` that git tracks, with their uncommitted changes.

    With ``packages`` only those of the named packages and modules, which must be at the top of ``folder``.

    Nobody adds secrets, checkpoints and logs to git, so files that git ignores or does not track are left out, as are
    submodules, bytecode, files over ``limits.max_file_bytes`` and links, except links to a tracked file of the folder,
    which are packed as that file. The log names what is left out.

    Raises:
        ConfigError: the folder does not exist, is not in a git checkout or has no tracked files, a package is not
            there, a file cannot be read or named, or the limits are exceeded.
    """
    limits = limits or ArchiveLimits()
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"code to sync: there is no folder {root}")
    tracked, left_out = _tracked(root)
    if packages:
        tracked, left_out = _of_packages(root, tracked, left_out, packages)
    files = _files(root, tracked, left_out, limits)
    _log(root, left_out)
    if not files:
        raise ConfigError(f"code to sync: there is nothing to send in {root}: `git add` the code")
    if len(files) > limits.max_files:
        raise _too_large(root, files, f"there are {len(files)} files, at most {limits.max_files} are accepted")
    total = sum(size for _, _, size, _ in files)
    if total > limits.max_total_bytes:
        raise _too_large(root, files, f"they have {total} bytes, at most {limits.max_total_bytes} are accepted")
    buffer = io.BytesIO()
    manifest: dict[str, str] = {}
    blobs: dict[str, set[str]] = {}
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as writer:
        for name, path, _, executable in files:
            content = _read(path, limits)
            writer.writestr(_entry(name, executable), content)
            manifest[name] = fingerprint(content, executable)
            blobs[name] = _blobs_of(content)
    if buffer.tell() > limits.max_archive_bytes:
        raise _too_large(root, files, f"packed they have {buffer.tell()} bytes, at most {limits.max_archive_bytes}")
    return CodeArchive(buffer.getvalue(), left_out, manifest, _revision(root, packages, left_out, blobs))


def _tracked(root: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the tracked files below ``root``; and the other files with the reason why they are left out."""
    # a file in conflict is listed once for each side
    entries = {name: entry for entry, _, name in (line.partition("\t") for line in _listed(root, "--stage"))}
    left_out = {name: "it is a submodule" for name, entry in entries.items() if entry.startswith(_SUBMODULE)}
    left_out |= {name: "it is bytecode" for name in entries if BYTECODE in name.split("/")}
    links = {name: entry.split(" ")[1] for name, entry in entries.items() if entry.startswith(_LINK)}
    texts = [name for name, blob in links.items() if _is_text(f"{root}/{name}", blob)]
    left_out |= dict.fromkeys(texts, "it is a link, of which this checkout has the text alone")
    others = ("--others", "--exclude-standard", "--directory")
    left_out |= dict.fromkeys(_listed(root, *others), _UNTRACKED)
    left_out |= dict.fromkeys(_listed(root, *others, "--ignored"), _IGNORED)
    return sorted(name for name in entries if name not in left_out), left_out


def _executables(root: Path) -> set[str] | None:
    """The files that git has as executable, where the disk does not say so (``core.fileMode`` off, as on Windows and on
    its disks in WSL); ``None`` where each file's own mode counts."""
    try:
        if _git(root, "config", "-z", "--bool", "--get", "core.fileMode") != ["false"]:
            return None
    except ConfigError:  # it is not set
        return None
    inside = os.path.realpath(root)
    entries = (line.partition("\t") for line in _listed(root, "--stage"))
    return {os.path.normcase(f"{inside}/{name}") for entry, _, name in entries if entry.startswith(_EXECUTABLE)}


def _is_text(path: str, blob: str) -> bool:
    """Whether git's link ``blob`` lies there as a file that holds the path to another one, as on Windows."""
    try:
        return not os.path.islink(path) and blob in _blobs_of(Path(path).read_bytes())
    except OSError:
        return False


def _blobs_of(content: bytes) -> set[str]:
    """The names that git gives to a file's content: one in each of its formats of a repository."""
    named = b"blob %d\0" % len(content) + content
    return {hashlib.new(kind, named, usedforsecurity=False).hexdigest() for kind in ("sha1", "sha256")}


def package_of(name: str) -> str:
    """The package or module at the top of a folder that its file ``name`` belongs to."""
    top, inside, _ = name.partition("/")
    return top if inside else top.removesuffix(".py")


def _of_packages(
    root: Path, tracked: list[str], left_out: dict[str, str], packages: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """What of ``tracked`` and ``left_out`` is of these packages; the rest of ``tracked`` is left out by its top."""
    there = {package_of(name) for name in tracked}
    if unknown := [name for name in packages if name not in there]:
        packages_there = ", ".join(sorted(there)) or "none"
        raise ConfigError(f"code to sync: git tracks no package {unknown[0]!r} in {root}; there are: {packages_there}")
    others = [name for name in tracked if package_of(name) not in packages]
    tops = sorted({"".join(name.partition("/")[:2]) for name in others})
    inner = {name: why for name, why in left_out.items() if package_of(name) in packages}
    return [name for name in tracked if package_of(name) in packages], inner | dict.fromkeys(tops, _NOT_NAMED)


def _revision(root: Path, packages: Collection[str], left_out: Mapping[str, str], blobs: Mapping[str, set[str]]) -> str:
    """See :class:`CodeArchive`; ``blobs`` are git's names of the packed contents.

    Contents are compared as they are in the work tree, because asking git would run the filters of the checkout.
    """
    try:
        [commit] = _git(root, "rev-parse", "--verify", "HEAD")
        lines = [line.partition("\t") for line in _git(root, "ls-tree", "-r", "-z", "HEAD")]
    except (ConfigError, ValueError):
        return ""
    head = {name: entry.split()[2] for entry, _, name in lines}
    # a link is packed as the file that it leads to
    links = {name for entry, _, name in lines if not entry.startswith("100")}
    differing = {name for name, named in blobs.items() if name not in links and head.get(name) not in named}
    wanted = {name for name in head if not packages or package_of(name) in packages}
    gone = wanted - links - blobs.keys() - {name for name, why in left_out.items() if why not in (_UNTRACKED, _IGNORED)}
    return commit.strip() + ("+changes" if differing or gone else "")


def _listed(root: Path, *options: str) -> list[str]:
    """The output of ``git ls-files`` below ``root``."""
    return _git(root, "ls-files", "-z", *options, "--", ".")


def _git(root: Path, *command: str) -> list[str]:
    """The output of a git command in ``root``, divided at NULs.

    Git runs no hook, filter or program of the checkout's configuration, and sees no variable that names another
    repository.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(root), *command],
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
                "it is in no git checkout. Only files that git tracks are sent, so that secrets and checkpoints stay "
                "here: run `git init` in it and `git add` the code"
            )
        raise ConfigError(f"code to sync: {root}: {reason}") from exc
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _files(root: Path, tracked: list[str], left_out: dict[str, str], limits: ArchiveLimits) -> list[_File]:
    """The files to pack; adds the others to ``left_out``."""
    inside = os.path.realpath(root)
    # git's names have slashes, and cases of letters that a disk need not have
    contents = {os.path.normcase(f"{inside}/{name}") for name in tracked}
    marked = _executables(root)
    files: list[_File] = []
    for name in tracked:
        path = f"{root}/{name}"
        try:
            resolved = os.path.realpath(path, strict=True)
            status = os.stat(resolved)
        except OSError as exc:
            if os.path.islink(path):
                left_out[name] = "it is a link to nothing"
            elif not isinstance(exc, (FileNotFoundError, NotADirectoryError)):
                raise ConfigError(f"code to sync: cannot read {path}: {exc}") from exc
            # else it was deleted
            continue
        plain = os.path.normcase(resolved)
        if plain not in contents:
            left_out[name] = "it leads to no file that is tracked in this folder"
        elif not stat.S_ISREG(status.st_mode):
            left_out[name] = "it is not a regular file"
        elif status.st_size > limits.max_file_bytes:
            left_out[name] = f"it has {status.st_size} bytes, more than {limits.max_file_bytes}"
        elif wrong := check_name(name):
            raise ConfigError(f"code to sync: {path!r} cannot be packed: {wrong}")
        else:
            executable = bool(status.st_mode & stat.S_IXUSR) if marked is None else plain in marked
            files.append((name, resolved, status.st_size, executable))
    return files


def left_out_lines(left_out: Mapping[str, str], most: int = 10) -> dict[str, str]:
    """By the reason why they are left out, the names of files, at most so many."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    return {
        reason: ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
        for reason, names in by_reason.items()
    }


def _log(root: Path, left_out: dict[str, str]) -> None:
    for reason, names in left_out_lines(left_out).items():
        level = logging.INFO if reason in (_IGNORED, _NOT_NAMED) else logging.WARNING
        logger.log(level, "code to sync: left out of %s, because %s: %s", root, reason, names)


def _too_large(root: Path, files: list[_File], why: str) -> ConfigError:
    largest = sorted(files, key=lambda file: file[2], reverse=True)[:3]
    names = ", ".join(f"{name} ({size} bytes)" for name, _, size, _ in largest)
    return ConfigError(
        f"code to sync: {root} is too large: {why}; sync a smaller folder, or take files out of git; the largest are "
        f"{names}"
    )


def _read(path: str, limits: ArchiveLimits) -> bytes:
    try:
        with open(path, "rb") as reader:
            content = reader.read(limits.max_file_bytes + 1)
    except OSError as exc:
        raise ConfigError(f"code to sync: cannot read {path}: {exc.strerror}") from exc
    if len(content) > limits.max_file_bytes:
        raise ConfigError(f"code to sync: {path} grew while it was packed")
    return content


def _entry(name: str, executable: bool) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EPOCH)
    # always "made on Unix": so the bytes are equal everywhere, and the mode counts
    info.create_system = 3
    info.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info
