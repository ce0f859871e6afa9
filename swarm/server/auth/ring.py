"""The tokens that a running server knows: its own, and those of ``tokens.json`` as it is now."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from swarm.credentials import Ring, Token, TokenFile, digest, matching
from swarm.errors import AuthenticationError
from swarm.server.auth.scopes import Caller

#: the name of the caller whose token is the server's own (``ServerConfig.token``)
CONFIGURED = "SWARM_TOKEN"
#: the same for the processes that were started together with the server (``ServerConfig.private_token``)
PRIVATE = "up"


class TokenRing(Ring[Token]):
    """Looks at the file before each answer: tokens rotate without a restart.

    Args:
        token: opens everything; None: there is no such token.
        private: opens everything too, but is no token that anybody made: that there is one closes nothing.
        run_dir: the folder of ``tokens.json``.
        look_every: seconds for which a look at the file's date holds; 0: each answer looks.

    Raises:
        ConfigError: the file is there and cannot be read; a server must not start on a guess.
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
        """Whether no token has ever been made: a revoked or expired one counts, for somebody wanted a closed door."""
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
            AuthenticationError: no token, or one that is unknown, expired or revoked.
        """
        if not key:
            raise AuthenticationError(
                "this route needs a token: send `Authorization: Bearer TOKEN` (`swarm-gateway swarm tokens create`)"
            )
        return self.holder(digest(key))

    def holder(self, key_digest: bytes) -> Caller:
        """The caller whose token has this digest; raises like :meth:`authenticate`."""
        self.refresh()
        token, own = self.find(key_digest), matching(key_digest, self._own)
        if own is not None:
            return own
        if token is None:
            raise AuthenticationError("unknown token: it is not one of this swarm server's")
        if (state := token.state(datetime.now(UTC))) != "active":
            # only who holds the token is told
            raise AuthenticationError(f"the token {token.name!r} is {state}: get a new one", code=f"token_{state}")
        return Caller(token.name, frozenset(token.scopes))
