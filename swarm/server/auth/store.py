"""``tokens.json`` in the run folder: the named tokens of one swarm server, as digests.

Invariant: the file is replaced as a whole, readable by its owner only, by one writer at a time; a reader sees the old
tokens or the new ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Generator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, Self

from pydantic import AwareDatetime, Field, ValidationError, model_validator

from swarm.errors import ConfigError
from swarm.job import describe_validation
from swarm.server.auth.token import TokenScope, digest, new_token
from swarm.types import Model

FILE_NAME = "tokens.json"
#: names allowed: they stand in logs and on command lines
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_MAX_BYTES = 1024 * 1024


class StoredToken(Model):
    """One token without its secret."""

    name: str = Field(pattern=NAME_PATTERN)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: list[TokenScope] = Field(min_length=1)
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None

    def state(self, now: datetime) -> Literal["active", "expired", "revoked"]:
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "active"


class _Contents(Model):
    version: Literal[1] = 1
    tokens: list[StoredToken] = []

    @model_validator(mode="after")
    def _unique(self) -> Self:
        if len({token.name for token in self.tokens}) < len(self.tokens):
            raise ValueError("two tokens have one name")
        return self


class TokenFile:
    """The tokens of the server whose run folder is ``run_dir``."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE_NAME

    def read(self) -> list[StoredToken]:
        """All tokens, revoked and expired ones too; none when there is no file.

        Raises:
            ConfigError: the file cannot be read, is damaged, or others may write it.
        """
        try:
            with self.path.open("rb") as reader:
                mode = os.fstat(reader.fileno()).st_mode
                text = reader.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise ConfigError(f"cannot read the tokens in {self.path}: {exc.strerror}") from exc
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(f"others may write {self.path} and so give themselves tokens: chmod 600 it")
        if len(text) > _MAX_BYTES:
            raise ConfigError(f"{self.path} is larger than {_MAX_BYTES} bytes: that is no file of tokens")
        try:
            return _Contents.model_validate_json(text).tokens
        except ValidationError as exc:
            raise describe_validation(exc, str(self.path)) from exc

    def create(self, name: str, scopes: Sequence[TokenScope], lifetime: timedelta | None = None) -> str:
        """A new token, which is told here and never again; it takes the place of a dead one of the same name.

        Raises:
            ConfigError: the name is taken or not allowed, there are no scopes, or the file cannot be read or written.
        """
        token = new_token()
        now = datetime.now(UTC)
        with self._exclusively():
            others = self.read()
            if any(other.name == name and other.state(now) == "active" for other in others):
                raise ConfigError(f"there is a token {name!r} already: revoke it first, or choose another name")
            try:
                created = StoredToken(
                    name=name,
                    sha256=digest(token).hex(),
                    scopes=sorted(set(scopes)),
                    created=now,
                    expires=None if lifetime is None else now + lifetime,
                )
            except (ValidationError, OverflowError) as exc:
                raise ConfigError(f"token {name!r}: {_reason(exc)}") from exc
            self._write([*(other for other in others if other.name != name), created])
        return token

    def revoke(self, name: str) -> StoredToken:
        """Revoke a token; a running server refuses it as soon as it looks at the file again.

        Raises:
            ConfigError: there is no token of that name, or the file cannot be read or written.
        """
        with self._exclusively():
            tokens = self.read()
            found = next((token for token in tokens if token.name == name), None)
            if found is None:
                known = ", ".join(token.name for token in tokens) or "none"
                raise ConfigError(f"there is no token {name!r} in {self.path}; there are: {known}")
            if found.revoked is None:
                found = found.model_copy(update={"revoked": datetime.now(UTC)})
                self._write([found if token.name == name else token for token in tokens])
        return found

    @contextlib.contextmanager
    def _exclusively(self) -> Generator[None]:
        """Keep other writers out; readers need not wait, the file is replaced as a whole."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path.with_name(f"{FILE_NAME}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigError(f"cannot write tokens in {self.path.parent}: {exc.strerror}") from exc
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _write(self, tokens: Sequence[StoredToken]) -> None:
        partial = self.path.with_name(f"{FILE_NAME}.{secrets.token_hex(8)}")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as writer:
                writer.write(_Contents(tokens=list(tokens)).model_dump_json(indent=2) + "\n")
                writer.flush()
                os.fsync(writer.fileno())
            partial.replace(self.path)
        except OSError as exc:
            raise ConfigError(f"cannot write {self.path}: {exc.strerror}") from exc
        finally:
            partial.unlink(missing_ok=True)


def _reason(exc: ValidationError | OverflowError) -> str:
    if isinstance(exc, OverflowError):
        return "it would expire beyond the calendar; leave --expires out"
    return describe_validation(exc, "it is not allowed").message
