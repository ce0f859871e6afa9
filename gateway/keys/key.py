"""``VirtualKey``: what is kept of one application's key, which is everything but its secret.

Invariant: from what is kept no key can be made.
"""

from __future__ import annotations

import hashlib
import secrets

from pydantic import Field

from swarm.credential import Credential

#: Begins every key, so that scanners for leaked secrets know one.
KEY_PREFIX = "sk-swarm-"
_ID_BYTES, _SECRET_BYTES = 6, 24


class VirtualKey(Credential):
    """One key; ``id`` stands in the key itself, in logs and in metrics."""

    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    label: str = Field(min_length=1, max_length=100, description="whose it is, for people")
    routes: list[str] | None = Field(default=None, description="names of the routes it opens; null: all")
    admin: bool = Field(default=False, description="whether it opens /admin too")
    requests_per_minute: int | None = Field(default=None, ge=1)
    max_in_flight: int | None = Field(default=None, ge=1, description="requests served at once; more of them wait")


def new_secret() -> tuple[str, str]:
    """The id and the text of a key that nobody has."""
    name = secrets.token_hex(_ID_BYTES)
    return name, f"{KEY_PREFIX}{name}-{secrets.token_urlsafe(_SECRET_BYTES)}"


def id_of(key: bytes) -> str:
    """The id that ``key`` says it has; empty where it has not the form of a virtual key."""
    prefix = KEY_PREFIX.encode()
    name, _, secret = key.removeprefix(prefix).partition(b"-")
    if not key.startswith(prefix) or not secret:
        return ""
    return name.decode("latin-1")


def digest(key: bytes) -> bytes:
    """The SHA-256 of a key. Keys are random, 24 bytes of them, so a slow hash would protect nothing more."""
    return hashlib.sha256(key).digest()
