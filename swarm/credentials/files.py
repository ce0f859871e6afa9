"""Small private files that several processes read and write.

Invariant: a file is replaced as a whole, readable by its owner only, by one writer at a time; a reader sees the old
contents or the new ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from swarm.errors import ConfigError
from swarm.job import describe_validation

M = TypeVar("M", bound=BaseModel)

_MAX_BYTES = 1024 * 1024


def read_private(path: Path, model: type[M], what: str) -> M:
    """The contents of ``path``, a file of ``what`` ("tokens"); an empty ``model`` when there is none.

    Raises:
        ConfigError: it cannot be read, is damaged or larger than a mebibyte, or others may write it.
    """
    try:
        with path.open("rb") as reader:
            mode = os.fstat(reader.fileno()).st_mode
            text = reader.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return model()
    except OSError as exc:
        raise ConfigError(f"cannot read the {what} in {path}: {exc.strerror}") from exc
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"others may write {path} and so give themselves {what}: chmod 600 it")
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{path} is larger than {_MAX_BYTES} bytes: that is no file of {what}")
    try:
        return model.model_validate_json(text)
    except ValidationError as exc:
        raise describe_validation(exc, str(path)) from exc


@contextlib.contextmanager
def exclusively(path: Path) -> Generator[None]:
    """Keep other writers of ``path`` out; readers need not wait.

    Raises:
        ConfigError: its folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def replace_private(path: Path, contents: BaseModel) -> None:
    """Replace what ``path`` contains; it is on disk when this returns.

    Raises:
        ConfigError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as writer:
            writer.write(contents.model_dump_json(indent=2) + "\n")
            writer.flush()
            os.fsync(writer.fileno())
        partial.replace(path)
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc
    finally:
        partial.unlink(missing_ok=True)
