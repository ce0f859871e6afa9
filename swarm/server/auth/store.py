"""``tokens.json`` in the run folder: the named tokens of one swarm server, as digests.

Invariant: as of :mod:`swarm.files`; a name belongs to one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from swarm.credential import Credential
from swarm.errors import ConfigError
from swarm.files import exclusively, read_private, replace_private
from swarm.job import describe_validation
from swarm.server.auth.token import TokenScope, digest, new_token
from swarm.types import Model

FILE_NAME = "tokens.json"
#: names allowed: they stand in logs and on command lines
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class StoredToken(Credential):
    """One token without its secret."""

    name: str = Field(pattern=NAME_PATTERN)
    scopes: list[TokenScope] = Field(min_length=1)


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
        text = read_private(self.path, "tokens")
        if text is None:
            return []
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
        with exclusively(self.path, "tokens"):
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
        with exclusively(self.path, "tokens"):
            tokens = self.read()
            found = next((token for token in tokens if token.name == name), None)
            if found is None:
                known = ", ".join(token.name for token in tokens) or "none"
                raise ConfigError(f"there is no token {name!r} in {self.path}; there are: {known}")
            if found.revoked is None:
                found = found.model_copy(update={"revoked": datetime.now(UTC)})
                self._write([found if token.name == name else token for token in tokens])
        return found

    def _write(self, tokens: Sequence[StoredToken]) -> None:
        replace_private(self.path, _Contents(tokens=list(tokens)).model_dump_json(indent=2) + "\n")


def _reason(exc: ValidationError | OverflowError) -> str:
    if isinstance(exc, OverflowError):
        return "it would expire beyond the calendar; leave --expires out"
    return describe_validation(exc, "it is not allowed").message
