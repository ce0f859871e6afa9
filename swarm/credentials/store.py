"""The credentials that were given out, in a file that keeps everything about them but their secrets.

Invariant: no secret can be made from what is kept; the file changes as :mod:`swarm.credentials.files` says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import AwareDatetime, Field, ValidationError, create_model

from swarm.credentials.files import exclusively, read_private, replace_private
from swarm.errors import ConfigError
from swarm.job import describe_validation
from swarm.types import Model

#: Tells one state of a file from another; ``None``: there is no file.
Mark = tuple[int, ...] | str | None


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
        fields: dict[str, Any] = {"version": (Literal[1], 1), f"{noun}s": (list[kind], [])}
        self._contents: type[Model] = create_model(f"{noun}s", __base__=Model, **fields)

    def mark(self) -> Mark:
        """What changes when the file does."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        except OSError as exc:
            return str(exc)
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode

    def read(self) -> list[C]:
        """All credentials, revoked and expired ones too; none when there is no file.

        Raises:
            ConfigError: the file cannot be read, is damaged, or others may write it.
        """
        found: list[C] = getattr(read_private(self.path, self._contents, f"{self.noun}s"), f"{self.noun}s")
        if len({one.names()[0] for one in found}) < len(found):
            raise ConfigError(f"{self.path}: two {self.noun}s have one name")
        return found

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
        with exclusively(self.path):
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
        with exclusively(self.path):
            known = self.read()
            found = [one for one in known if one.names()[0] == name] or [
                one for one in known if one.names()[1] == name and one.revoked is None
            ]
            if not found:
                active = ", ".join(one.names()[1] for one in known if one.state(now) == "active") or "none"
                raise ConfigError(f"there is no {self.noun} {name!r} in {self.path}; there are: {active}")
            revoked = {one.sha256: one.model_copy(update={"revoked": one.revoked or now}) for one in found}
            self._write([revoked.get(one.sha256, one) for one in known])
        return revoked[found[-1].sha256]

    def _write(self, credentials: Sequence[C]) -> None:
        replace_private(self.path, self._contents.model_validate({f"{self.noun}s": credentials}))
