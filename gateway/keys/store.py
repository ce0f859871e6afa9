"""The file of virtual keys, and beside it when each was last used.

Invariant: as of :mod:`swarm.files`. Only the operator's commands write the keys; gateways write what they saw in use,
into a file of its own, so that nothing a gateway does can lose a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, Self

from pydantic import AwareDatetime, ValidationError, model_validator

from gateway.keys.key import VirtualKey, digest, new_secret
from swarm.errors import ConfigError
from swarm.files import exclusively, read_private, replace_private
from swarm.job import describe_validation
from swarm.types import Model

_WHAT = "keys"

#: Tells one state of a file from another.
Mark = tuple[int, int, int] | None


class _Contents(Model):
    version: Literal[1] = 1
    keys: list[VirtualKey] = []

    @model_validator(mode="after")
    def _unique(self) -> Self:
        if len({key.id for key in self.keys}) < len(self.keys):
            raise ValueError("two keys have one id")
        return self


class _LastUsed(Model):
    last_used: dict[str, AwareDatetime] = {}


class KeyFile:
    """The virtual keys in the file at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._used_path = path.with_name(f"{path.name}.used")

    def mark(self) -> Mark:
        """Another one whenever the keys have changed; ``None`` while there is no file."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> list[VirtualKey]:
        """All keys, revoked and expired ones too; none when there is no file.

        Raises:
            ConfigError: the file cannot be read, is damaged, or others may write it.
        """
        text = read_private(self.path, _WHAT)
        if text is None:
            return []
        try:
            return _Contents.model_validate_json(text).keys
        except ValidationError as exc:
            raise describe_validation(exc, str(self.path)) from exc

    def create(
        self,
        label: str,
        *,
        routes: Sequence[str] | None = None,
        admin: bool = False,
        requests_per_minute: int | None = None,
        max_in_flight: int | None = None,
        lifetime: timedelta | None = None,
    ) -> tuple[VirtualKey, str]:
        """A new key; its text, the second of what is returned, is told here and never again.

        Raises:
            ConfigError: an active key has the label, a value is out of range, or the file cannot be read or written.
        """
        name, text = new_secret()
        now = datetime.now(UTC)
        with exclusively(self.path, _WHAT):
            others = self.read()
            if any(other.label == label and other.state(now) == "active" for other in others):
                raise ConfigError(f"there is a key {label!r} already: revoke it first, or choose another label")
            try:
                key = VirtualKey(
                    id=name,
                    label=label,
                    sha256=digest(text.encode()).hex(),
                    routes=sorted(set(routes)) if routes is not None else None,
                    admin=admin,
                    requests_per_minute=requests_per_minute,
                    max_in_flight=max_in_flight,
                    created=now,
                    expires=None if lifetime is None else now + lifetime,
                )
            except ValidationError as exc:
                raise describe_validation(exc, "the key", VirtualKey) from exc
            except OverflowError as exc:
                raise ConfigError("the key would expire beyond the calendar: leave --expires out") from exc
            self._write([*others, key])
        return key, text

    def revoke(self, name: str) -> VirtualKey:
        """Revoke the key with the id ``name``, or the active one with that label.

        Raises:
            ConfigError: there is none, or the file cannot be read or written.
        """
        now = datetime.now(UTC)
        with exclusively(self.path, _WHAT):
            keys = self.read()
            found = [key for key in keys if key.id == name] or [
                key for key in keys if key.label == name and key.state(now) != "revoked"
            ]
            if not found:
                known = ", ".join(key.label for key in keys if key.state(now) == "active") or "none"
                raise ConfigError(f"there is no key {name!r} in {self.path}; there are: {known}")
            revoked = {key.id: key.model_copy(update={"revoked": key.revoked or now}) for key in found}
            self._write([revoked.get(key.id, key) for key in keys])
        return revoked[found[-1].id]

    def last_used(self) -> dict[str, datetime]:
        """When each key was last used, by its id, as far as gateways have told; to about half a minute."""
        text = read_private(self._used_path, _WHAT)
        if text is None:
            return {}
        try:
            return dict(_LastUsed.model_validate_json(text).last_used)
        except ValidationError as exc:
            raise describe_validation(exc, str(self._used_path)) from exc

    def note_used(self, used: Mapping[str, datetime]) -> None:
        """Add what one gateway saw to what is known; several gateways may share the file.

        Raises:
            ConfigError: it cannot be read or written.
        """
        with exclusively(self._used_path, _WHAT):
            known = self.last_used()
            for name, moment in used.items():
                known[name] = max(moment, known.get(name, moment))
            replace_private(self._used_path, _LastUsed(last_used=known).model_dump_json(indent=2) + "\n")

    def _write(self, keys: Sequence[VirtualKey]) -> None:
        replace_private(self.path, _Contents(keys=list(keys)).model_dump_json(indent=2) + "\n")
