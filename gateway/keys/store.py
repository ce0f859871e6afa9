"""The virtual keys of a gateway in their file, and beside it when each was last used.

Invariant: only the operator's commands write the keys; gateways write what they saw in use, into a file of its own, so
that nothing a gateway does can lose a key.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime, Field

from swarm.credentials import Credential, CredentialFile, exclusively, read_private, replace_private
from swarm.evidence.pairs import Side
from swarm.types import Model

#: Begins every key, so that scanners for leaked secrets know one.
KEY_PREFIX = "sk-swarm-"
#: ``look`` at groups, ``judge`` them too, ``decide`` on policies too.
PageScope = Literal["look", "judge", "decide"]
_ID_BYTES, _SECRET_BYTES = 6, 24


class VirtualKey(Credential):
    """One key without its secret; ``id`` stands in the key itself, in logs and in metrics."""

    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    label: str = Field(min_length=1, max_length=100, description="whose it is, for people")
    routes: list[str] | None = Field(default=None, description="names of the routes it opens; null: all")
    admin: bool = Field(default=False, description="whether it opens /admin too")
    requests_per_minute: int | None = Field(default=None, ge=1)
    max_in_flight: int | None = Field(default=None, ge=1, description="requests served at once; more of them wait")
    train: bool | None = Field(default=None, description="whether its requests may be trained; null: as the route says")
    side: Side | None = Field(default=None, description="who answers its requests in a canary; null: drawn")
    page: PageScope | None = Field(default=None, description="what it opens of the page; null: nothing, unless admin")

    def names(self) -> tuple[str, str]:
        return self.id, self.label


class _LastUsed(Model):
    last_used: dict[str, AwareDatetime] = {}


class KeyFile(CredentialFile[VirtualKey]):
    """The virtual keys in the file at ``path``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, VirtualKey, "key")
        # gateways with links to one file share what is beside it
        shared = self._target
        self._used_path = shared.with_name(f"{shared.name}.used")
        #: which keys and sessions said no
        self.refusals_path = shared.with_name(f"{shared.name}.refusals")
        #: who commanded, or wanted to: a line of JSON each
        self.audit_path = shared.with_name(f"{shared.name}.audit.jsonl")

    def create(
        self, label: str, *, routes: Sequence[str] | None = None, lifetime: timedelta | None = None, **fields: Any
    ) -> tuple[VirtualKey, str]:
        """A new key, with more ``fields`` of :class:`VirtualKey`; its text, the second of what is returned, is shown
        here and never again.

        Raises:
            ConfigError: an active key has the label, a value is out of range, or the file cannot be read or written.
        """
        name = secrets.token_hex(_ID_BYTES)
        text = f"{KEY_PREFIX}{name}-{secrets.token_urlsafe(_SECRET_BYTES)}"
        opened = sorted(set(routes)) if routes is not None else None
        return self.add(text, lifetime, id=name, label=label, routes=opened, **fields), text

    def last_used(self) -> dict[str, datetime]:
        """When each key was last used, by its id, as far as gateways have noted; to about half a minute."""
        return dict(read_private(self._used_path, _LastUsed, "uses").last_used)

    def note_used(self, used: Mapping[str, datetime]) -> None:
        """Add what one gateway saw to what is known; several gateways may share the file.

        Raises:
            ConfigError: it cannot be read or written.
        """
        with exclusively(self._used_path):
            times = self.last_used()
            for name, moment in used.items():
                times[name] = max(moment, times.get(name, moment))
            # those of keys that are gone would fill it; while the file of keys is moved, none is
            ids = {key.id for key in self.read()} or set(times)
            times = {name: moment for name, moment in times.items() if name in ids}
            replace_private(self._used_path, _LastUsed(last_used=times))
