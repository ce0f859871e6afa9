"""The credentials of a file as it is now, by digest.

Invariant: the file's last good contents count; a damaged or missing file neither opens a server nor locks it.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

from swarm.credentials.store import C, CredentialFile
from swarm.errors import ConfigError

T = TypeVar("T")

logger = logging.getLogger(__name__)


def matching(given: bytes, known: Mapping[bytes, T]) -> T | None:
    """What belongs to the digest ``given``. Each digest is compared, in constant time: how long it takes tells nothing
    about which are near."""
    found = [value for digest, value in known.items() if hmac.compare_digest(given, digest)]
    return found[0] if found else None


class Ring(Generic[C]):
    """Reads its file again when it has changed: credentials come and go without a restart.

    Args:
        file: of the credentials.
        look_every: seconds for which a look at the file's date holds; 0: each :meth:`refresh` looks.

    Raises:
        ConfigError: the file is there and cannot be read; a server must not start on a guess.
    """

    def __init__(self, file: CredentialFile[C], look_every: float = 0.0) -> None:
        self.file = file
        self._look_every = look_every
        self._looked = time.monotonic()
        self._mark = file.mark()
        self._held = self._read()

    @property
    def credentials(self) -> Collection[C]:
        """All of the file, revoked and expired ones too."""
        return self._held.values()

    def find(self, given: bytes) -> C | None:
        """The credential with the digest ``given``, in whatever state."""
        return matching(given, self._held)

    def refresh(self) -> None:
        """Look at the file and read it if it has changed. One that is damaged or gone is logged, once. Any thread may
        do this."""
        now = time.monotonic()
        if now - self._looked < self._look_every:
            return
        self._looked = now
        mark = self.file.mark()
        if mark == self._mark:
            return
        self._mark = mark
        try:
            if mark is None:
                raise ConfigError(f"{self.file.path} is gone")
            self._held = self._read()
        except ConfigError as exc:
            logger.error("%s; the %ss known so far stay in force", exc.message, self.file.noun)
        else:
            logger.info("read %d %ss from %s", len(self._held), self.file.noun, self.file.path)

    def _read(self) -> dict[bytes, C]:
        return {bytes.fromhex(one.sha256): one for one in self.file.read()}
