"""``tokens.json`` in the run folder: the named tokens of one swarm server."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal

from pydantic import Field

from swarm.credentials.store import Credential, CredentialFile

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
