"""Keys and tokens: what is kept of them, the files they are kept in, and how a running server looks them up.

Invariant: no secret is kept, only its digest. A file is replaced as a whole, readable by its owner only, by one writer
at a time. Its last good contents count: a damaged or missing file neither opens a server nor locks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import json
import logging
import math
import os
import secrets
import stat
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, Field, ValidationError, create_model

from swarm.errors import ConfigError
from swarm.files import append_line, give, replace_file
from swarm.types import Model
from swarm.validation import describe_validation

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)

#: Credentials in a file that open nothing any more: the older ones are forgotten.
_MOST_DEAD = 1000
_REPEATED_SECONDS, _MOST_READS = 60.0, 1000


def read_private(path: Path, model: type[M], what: str) -> M:
    """The contents of ``path``, a file of ``what`` ("tokens"); an empty ``model`` when there is none.

    Raises:
        ConfigError: it cannot be read, is damaged, or others may write it.
    """
    try:
        with path.open("rb") as reader:
            mode = os.fstat(reader.fileno()).st_mode
            text = reader.read()
    except FileNotFoundError:
        return model()
    except OSError as exc:
        raise ConfigError(f"cannot read the {what} in {path}: {exc.strerror}") from exc
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"others may write {path} and so give themselves {what}: chmod 600 it")
    try:
        return model.model_validate_json(text)
    except ValidationError as exc:
        raise describe_validation(exc, str(path)) from exc


@contextlib.contextmanager
def exclusively(path: Path) -> Generator[None]:
    """Keep other writers of ``path`` out; readers need not wait.

    Raises:
        ConfigError: its folder cannot be written, or has no locks, as some network file systems.
    """
    import fcntl  # not on Windows, where nobody writes credentials, and clients need the rest of this module

    name = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # what is there already may be a link to a file of root's
        with contextlib.suppress(FileExistsError):
            made = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            give(made, path)
            os.close(made)
        lock = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as exc:
            raise ConfigError(f"cannot lock {path}: {exc.strerror}") from exc
        yield
    finally:
        os.close(lock)


def replace_private(path: Path, contents: BaseModel, *, keeps_owner: bool = False) -> None:
    """Replace what ``path`` contains; it is on disk when this returns. Arguments as of
    :func:`swarm.files.replace_file`.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        replace_file(path, f"{contents.model_dump_json(indent=2)}\n".encode(), keeps_owner=keeps_owner)
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc


def append_private(path: Path, entry: Mapping[str, Any]) -> None:
    """Append a line of JSON to a file that only its owner reads; one that root begins is the folder's owner's, see
    :func:`swarm.files.append_line`."""
    append_line(path, json.dumps(entry, default=str).encode() + b"\n", keeps_owner=True)


async def append_audit(path: Path, entry: Mapping[str, Any]) -> None:
    """Append ``entry`` with the time to an audit log, whose folder is made; it is on disk when this returns, also for a
    caller who is cancelled. A disk that refuses it is logged with the line."""
    line = {"when": datetime.now(UTC).isoformat(), **entry}

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_private(path, line)

    try:
        await asyncio.shield(asyncio.to_thread(write))
    except OSError as exc:
        logger.error("the audit log %s cannot be written (%s): %s", path, exc, line)


class RepeatedReads:
    """Which reads an audit log takes: of one that a page repeats again and again, one a minute."""

    def __init__(self) -> None:
        self._written: dict[str, float] = {}

    def due(self, entry: Mapping[str, Any]) -> bool:
        """Whether ``entry`` is to be written; it counts as written then."""
        name, now = repr(entry), time.monotonic()
        if now - self._written.get(name, -math.inf) < _REPEATED_SECONDS:
            return False
        if len(self._written) >= _MOST_READS:
            self._written.clear()
        self._written[name] = now
        return True


def mark_of(path: Path) -> tuple[int, ...] | str | None:
    """What changes when the file does; ``None``: there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as exc:
        return str(exc)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode


def digest(secret: str | bytes) -> bytes:
    """The SHA-256 of a secret. Ours are random, 24 bytes or more: a slow hash would protect nothing more."""
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).digest()


class Credential(Model):
    """What is kept of one secret; ``sha256`` is of its whole text."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None

    def names(self) -> tuple[str, str]:
        """What tells it from all others in its file, and what people call it: unique among the active ones."""
        raise NotImplementedError

    def state(self, now: datetime) -> Literal["active", "expired", "revoked"]:
        """Whether it opens anything at ``now``."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "active"


C = TypeVar("C", bound=Credential)


@functools.cache
def _contents_of(kind: type[Credential], noun: str) -> type[Model]:
    fields: dict[str, Any] = {"version": (Literal[1], 1), f"{noun}s": (list[kind], [])}
    return create_model(f"{noun}s", __base__=Model, **fields)


class CredentialFile(Generic[C]):
    """The credentials in one file: ``{"version": 1, "tokens": [...]}``.

    Args:
        path: of the file, which need not exist.
        kind: of the credentials.
        noun: what one is called, such as ``"token"``.
    """

    def __init__(self, path: Path, kind: type[C], noun: str) -> None:
        self.path = path
        self._kind = kind
        self.noun = noun
        self._contents = _contents_of(kind, noun)

    def read(self) -> list[C]:
        """All credentials, revoked and expired ones too; none when there is no file.

        Raises:
            ConfigError: the file cannot be read, is damaged, or others may write it.
        """
        credentials: list[C] = getattr(read_private(self.path, self._contents, f"{self.noun}s"), f"{self.noun}s")
        if len({credential.names()[0] for credential in credentials}) < len(credentials):
            raise ConfigError(f"{self.path}: two {self.noun}s have one name")
        return credentials

    def add(self, secret: str, lifetime: timedelta | None, **fields: Any) -> C:
        """Keep a new credential with this secret, in place of a dead one of the same name.

        Raises:
            ConfigError: an active one has the name, a field is wrong, or the file cannot be read or written.
        """
        now = datetime.now(UTC)
        try:
            expires = None if lifetime is None else now + lifetime
            new = self._kind(sha256=digest(secret).hex(), created=now, expires=expires, **fields)
        except ValidationError as exc:
            raise describe_validation(exc, f"the {self.noun}", self._kind) from exc
        except OverflowError as exc:
            raise ConfigError(f"the {self.noun} would expire beyond the calendar: leave --expires out") from exc
        unique, name = new.names()
        with exclusively(self._target):
            others = self.read()
            if any(other.names()[1] == name and other.state(now) == "active" for other in others):
                raise ConfigError(f"there is a {self.noun} {name!r} already: revoke it first, or choose another name")
            self._write([*(other for other in others if other.names()[0] != unique), new])
        return new

    def revoke(self, name: str) -> C:
        """Revoke a credential; running servers refuse it as soon as they look at the file again.

        Raises:
            ConfigError: there is none of that name, or the file cannot be read or written.
        """
        now = datetime.now(UTC)
        # a folder that is misspelt is not made
        with exclusively(self._target) if self.path.exists() else contextlib.nullcontext():
            credentials = self.read()
            named = [credential for credential in credentials if credential.names()[0] == name] or [
                credential for credential in credentials if credential.names()[1] == name and credential.revoked is None
            ]
            if not named:
                active = (
                    ", ".join(credential.names()[1] for credential in credentials if credential.state(now) == "active")
                    or "none"
                )
                raise ConfigError(f"there is no {self.noun} {name!r} in {self.path}; there are: {active}")
            revoked = {
                credential.sha256: credential.model_copy(update={"revoked": credential.revoked or now})
                for credential in named
            }
            self._write([revoked.get(credential.sha256, credential) for credential in credentials])
        return revoked[named[-1].sha256]

    @property
    def _target(self) -> Path:
        """Where a link leads now: nobody replaces the link, which may lead elsewhere later, and all names have one
        lock."""
        return Path(os.path.realpath(self.path))

    def _write(self, credentials: Sequence[C]) -> None:
        now = datetime.now(UTC)
        dead = [number for number, credential in enumerate(credentials) if credential.state(now) != "active"]
        forgotten = {*dead[:-_MOST_DEAD]}
        kept = [credential for number, credential in enumerate(credentials) if number not in forgotten]
        contents = self._contents.model_validate({f"{self.noun}s": kept})
        # an operator may be root where the server is not
        replace_private(self._target, contents, keeps_owner=True)


#: ``claim``: run episodes. ``admin``: everything. ``read``: status and metrics, which every token may.
TokenScope = Literal["claim", "admin", "read"]


class Token(Credential):
    """One token without its secret; its name stands in logs and on command lines."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    scopes: list[TokenScope] = Field(min_length=1)

    def names(self) -> tuple[str, str]:
        return self.name, self.name


class TokenFile(CredentialFile[Token]):
    """The tokens of the server whose run folder is ``run_dir``."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir / "tokens.json", Token, "token")

    def create(self, name: str, scopes: Sequence[str], lifetime: timedelta | None = None) -> str:
        """A new token of 256 random bits, which is shown here and never again.

        Raises:
            ConfigError: the name is taken or not allowed, a scope is unknown or there is none, or the file cannot be
                read or written.
        """
        secret = f"swt_{secrets.token_urlsafe(32)}"
        self.add(secret, lifetime, name=name, scopes=sorted(set(scopes)))
        return secret


T = TypeVar("T")


def matching(key_digest: bytes, by_digest: Mapping[bytes, T]) -> T | None:
    """The value of the key with this digest, if there is one. All digests are compared, each in constant time, so that
    the time tells nothing about which digests are near."""
    matches = [value for digest, value in by_digest.items() if hmac.compare_digest(key_digest, digest)]
    return matches[0] if matches else None


class Ring(Generic[C]):
    """Reads its file again when it has changed: credentials come and go without a restart.

    Args:
        file: of the credentials.

    Raises:
        ConfigError: the file is there and cannot be read; a server must not start on a guess.
    """

    def __init__(self, file: CredentialFile[C]) -> None:
        self.file = file
        self._mark = mark_of(file.path)
        self._held = self._read()
        self._complaint = ""

    @property
    def credentials(self) -> Collection[C]:
        """All of the file, revoked and expired ones too."""
        return self._held.values()

    def find(self, key_digest: bytes) -> C | None:
        """The credential with the digest ``key_digest``, in whatever state."""
        return matching(key_digest, self._held)

    def refresh(self) -> None:
        """Look at the file and read it if it has changed. One that is damaged or gone is logged, once, and read again
        at the next look. Any thread may do this."""
        mark = mark_of(self.file.path)
        if mark == self._mark:
            self._complaint = ""
            return
        try:
            if mark is None:
                raise ConfigError(f"{self.file.path} is gone")
            self._held = self._read()
        except ConfigError as exc:
            if exc.message != self._complaint:
                logger.error("%s; the %ss known so far stay in force", exc.message, self.file.noun)
            self._complaint = exc.message
        else:
            self._mark, self._complaint = mark, ""
            logger.info("read %d %ss from %s", len(self._held), self.file.noun, self.file.path)

    def _read(self) -> dict[bytes, C]:
        return {bytes.fromhex(credential.sha256): credential for credential in self.file.read()}
