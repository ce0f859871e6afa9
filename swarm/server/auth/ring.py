"""The tokens of a running server, its own and those that ``tokens.json`` holds now, and the callers that they name."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from swarm.credentials import Ring, Token, TokenFile, TokenScope, digest, matching
from swarm.errors import AuthenticationError

#: the name of the caller whose token is the server's own (``ServerConfig.token``)
CONFIGURED = "SWARM_TOKEN"
#: the same for processes started together with the server (``ServerConfig.private_token``)
PRIVATE = "up"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the name of its token, for people and for the log, and what the token allows.

    :class:`~swarm.server.auth.middleware.AuthMiddleware` puts it in ``scope["caller"]``.
    """

    name: str
    scopes: frozenset[TokenScope]

    def may(self, needed: TokenScope) -> bool:
        """Whether a route that needs ``needed`` is open to this caller."""
        return "admin" in self.scopes or needed in self.scopes or (needed == "read" and bool(self.scopes))


class TokenRing(Ring[Token]):
    """Checks the file before each answer, so tokens rotate without a restart.

    Args:
        token: opens everything; None: there is no such token.
        private: opens everything too, but does not count as a token that somebody made, so it closes nothing.
        run_dir: the folder of ``tokens.json``.
        look_every: seconds for which a check of the file's date holds; 0: each answer checks it.

    Raises:
        ConfigError: the file exists and cannot be read.
    """

    def __init__(self, token: str | None, run_dir: Path, look_every: float = 0.0, private: str | None = None) -> None:
        super().__init__(TokenFile(run_dir), look_every)
        self._configured = bool(token)
        self._own = {
            digest(own): Caller(name, frozenset({"admin"}))
            for name, own in ((PRIVATE, private), (CONFIGURED, token))
            if own
        }

    @property
    def empty(self) -> bool:
        """Whether no token was ever made. Revoked and expired ones count: somebody wanted the server closed."""
        self.refresh()
        return not (self._configured or self.credentials)

    def usable(self) -> bool:
        """Whether any token opens anything now."""
        self.refresh()
        now = datetime.now(UTC)
        return self._configured or any(token.state(now) == "active" for token in self.credentials)

    def authenticate(self, key: bytes) -> Caller:
        """The caller whose token is ``key``.

        Raises:
            AuthenticationError: the token is unknown, expired or revoked.
        """
        key_digest = digest(key)
        self.refresh()
        token, own = self.find(key_digest), matching(key_digest, self._own)
        if own is not None:
            return own
        if token is None:
            raise AuthenticationError("unknown token: it is not one of this swarm server's")
        if (state := token.state(datetime.now(UTC))) != "active":
            # only the holder of the token learns this
            raise AuthenticationError(f"the token {token.name!r} is {state}: get a new one", code=f"token_{state}")
        return Caller(token.name, frozenset(token.scopes))
