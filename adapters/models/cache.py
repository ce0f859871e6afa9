"""The model cache: every folder in it is complete and has a manifest of checksums."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
from pydantic import ValidationError

from swarm.errors import ConfigError
from swarm.types import Model, OnProgress

MANIFEST = "manifest.json"
_STAGING_PREFIX = ".pull-"


class FileRecord(Model):
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


class Manifest(Model):
    """A cached model: its name, origin, licence and files."""

    name: str
    source: str
    licence: str
    files: dict[str, FileRecord]


class CachedModel(Model):
    """A complete model of the cache; ``bytes`` is the size of its files."""

    name: str
    path: Path
    source: str
    licence: str
    bytes: int


def models_home() -> Path:
    """``$SWARM_GATEWAY_HOME/models``, by default ``~/.cache/swarm-gateway/models``."""
    home = os.environ.get("SWARM_GATEWAY_HOME") or "~/.cache/swarm-gateway"
    return Path(os.path.expanduser(home)).absolute() / "models"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of ``folder``, or ``None`` unless it is readable and every file in it has its size."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        complete = all((folder / name).stat().st_size == record.size for name, record in manifest.files.items())
    except (OSError, ValidationError):
        return None
    return manifest if complete else None


def cached_path(name: str) -> Path | None:
    """The folder of the cached model ``name``, or None; checks sizes, not contents."""
    folder = models_home() / name
    return folder if read_manifest(folder) else None


def list_cached() -> list[CachedModel]:
    """The complete models of the cache, sorted by name."""
    models: list[CachedModel] = []
    home = models_home()
    for folder in sorted(home.iterdir()) if home.is_dir() else []:
        manifest = None if folder.name.startswith(".") else read_manifest(folder)
        if manifest is not None:
            size = sum(record.size for record in manifest.files.values())
            models.append(
                CachedModel(name=folder.name, path=folder, source=manifest.source, licence=manifest.licence, bytes=size)
            )
    return models


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_files(folder: Path, progress: OnProgress) -> dict[str, FileRecord]:
    """Size and checksum of every regular file below ``folder``, except a manifest."""
    progress("checking", 0, None, "B")
    return {
        path.relative_to(folder).as_posix(): FileRecord(size=path.stat().st_size, sha256=checksum(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def is_intact(folder: Path, manifest: Manifest, progress: OnProgress) -> bool:
    """Whether every file in ``folder`` that its ``manifest`` names still has its checksum."""
    actual = record_files(folder, progress)
    return all(actual.get(name) == record for name, record in manifest.files.items())


@contextmanager
def staging() -> Generator[Path]:
    """A fresh folder on the cache's file system, deleted at the end; first deletes those of dead processes.

    Raises:
        ConfigError: the cache cannot be written.
    """
    home = models_home()
    try:
        home.mkdir(parents=True, exist_ok=True)
        for leftover in home.glob(f"{_STAGING_PREFIX}*"):
            owner = leftover.name.removeprefix(_STAGING_PREFIX).partition("-")[0]
            if owner.isdigit() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(leftover, ignore_errors=True)
        workspace = tempfile.TemporaryDirectory(
            prefix=f"{_STAGING_PREFIX}{os.getpid()}-", dir=home, ignore_cleanup_errors=True
        )
    except OSError as exc:
        raise ConfigError(
            f"the model cache {home} cannot be written ({exc.strerror}); set SWARM_GATEWAY_HOME to another folder"
        ) from exc
    with workspace as folder:
        yield Path(folder)


def install(built: Path, manifest: Manifest) -> Path:
    """Move the complete folder ``built`` (inside :func:`staging`) into the cache under ``manifest.name``.

    It replaces an earlier one. If another process installs the same name at this moment, one of the two stays.
    """
    (built / MANIFEST).write_text(manifest.model_dump_json(indent=1))
    target = models_home() / manifest.name
    if target.exists():
        target.rename(built.parent / "replaced")
    try:
        built.rename(target)
    except OSError:
        if read_manifest(target) is None:
            raise
    return target
