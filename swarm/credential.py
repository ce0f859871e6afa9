"""``Credential``: what is kept of a secret that somebody was given, be it a token or a key.

Invariant: from what is kept no secret can be made.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import AwareDatetime, Field

from swarm.types import Model


class Credential(Model):
    """A secret without itself; ``sha256`` is of the whole of it."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None

    def state(self, now: datetime) -> Literal["active", "expired", "revoked"]:
        """Whether it opens anything at ``now``."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "active"
