"""The tokens that a running server knows: the configured one, and those of ``tokens.json`` as it is now.

Invariant: the file's last good contents count; a damaged or missing file neither opens the server nor locks it.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from datetime import UTC, datetime
from pathlib import Path

from swarm.errors import AuthenticationError, ConfigError
from swarm.server.auth.store import StoredToken, TokenFile
from swarm.server.auth.token import Caller, digest

logger = logging.getLogger(__name__)

#: the name of the caller whose token is the server's own (``ServerConfig.token``)
CONFIGURED = "SWARM_TOKEN"
#: the same for the processes that were started together with the server (``ServerConfig.private_token``)
PRIVATE = "up"


class TokenRing:
    """Looks at the file's date before each answer and reads it again when it changed: tokens rotate without a restart.

    Args:
        token: opens everything; None: there is no such token.
        private: opens everything too, but is no token that anybody made: that there is one closes nothing.
        run_dir: the folder of ``tokens.json``.
        look_every: seconds for which a look at the file's date holds; 0: each answer looks.

    Raises:
        ConfigError: the file is there and cannot be read; a server must not start on a guess.
    """

    def __init__(self, token: str | None, run_dir: Path, look_every: float = 0.0, private: str | None = None) -> None:
        self._file = TokenFile(run_dir)
        self._configured = bool(token)
        #: the server's own, by digest
        self._own = [
            (digest(own), Caller(name, frozenset({"admin"})))
            for name, own in ((CONFIGURED, token), (PRIVATE, private))
            if own
        ]
        self._look_every = look_every
        self._looked = time.monotonic()
        self._seen = self._look()
        self._tokens: dict[bytes, StoredToken] = _by_digest(self._file.read())

    @property
    def empty(self) -> bool:
        """Whether no token has ever been made: a revoked or expired one counts, for somebody wanted a closed door."""
        self._refresh()
        return not (self._configured or self._tokens)

    def usable(self) -> bool:
        """Whether any token opens anything now."""
        self._refresh()
        now = datetime.now(UTC)
        return self._configured or any(token.state(now) == "active" for token in self._tokens.values())

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
        self._refresh()
        # all of them, each in constant time: how long it takes tells nothing about which are near
        found = [token for known, token in self._tokens.items() if hmac.compare_digest(key_digest, known)]
        for own, caller in self._own:
            if hmac.compare_digest(key_digest, own):
                return caller
        if not found:
            raise AuthenticationError("unknown token: it is not one of this swarm server's")
        token = found[0]
        state = token.state(datetime.now(UTC))
        if state != "active":
            # only who holds the token is told
            raise AuthenticationError(f"the token {token.name!r} is {state}: get a new one", code=f"token_{state}")
        return Caller(token.name, frozenset(token.scopes))

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked < self._look_every:
            return
        self._looked = now
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            if seen is None:
                raise ConfigError(f"{self._file.path} is gone")
            self._tokens = _by_digest(self._file.read())
        except ConfigError as exc:
            logger.error("%s; the tokens known so far stay in force", exc.message)
        else:
            logger.info("read %d tokens from %s", len(self._tokens), self._file.path)

    def _look(self) -> tuple[int, ...] | str | None:
        """What changes when the file does."""
        try:
            found = os.stat(self._file.path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            return f"{exc}"
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


def _by_digest(tokens: list[StoredToken]) -> dict[bytes, StoredToken]:
    return {bytes.fromhex(token.sha256): token for token in tokens}
