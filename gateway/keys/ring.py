"""Who a key belongs to. Only digests of keys are held, compared in constant time.

Invariant: a ring that was made for keys is never open, whatever becomes of their file; a key that was revoked opens
nothing :data:`POLL_SECONDS` later.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import SecretStr

from gateway.config import DIGEST_PREFIX, GatewayConfig
from gateway.forms import Caller
from gateway.keys.key import VirtualKey, digest, id_of
from gateway.keys.rate import RequestRate
from gateway.keys.store import KeyFile, Mark
from swarm.errors import AuthenticationError, ConfigError, OverloadedError

logger = logging.getLogger(__name__)

#: How often the file of virtual keys is looked at.
POLL_SECONDS = 1.0
#: How often the last uses of keys are written down.
_NOTE_SECONDS = 30.0

_WRONG = "wrong or missing API key: send one of the gateway's keys as `Authorization: Bearer ...` or `x-api-key`"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a key; ``virtual`` is ``None`` for keys of the configuration and where no key is asked for."""

    caller: Caller
    admin: bool
    virtual: VirtualKey | None = None


class KeyRing:
    """The accepted keys of one gateway; one without ``api_keys`` and ``keys_file`` accepts everyone as its operator."""

    def __init__(self, config: GatewayConfig) -> None:
        self._fixed: dict[bytes, Holder] = {}
        self._virtual: dict[str, VirtualKey] = {}
        self._file: KeyFile | None = None
        self._mark: Mark = None
        self._open = False
        self._rates: dict[str, RequestRate] = {}
        self._used: dict[str, datetime] = {}
        self._complaint = ""
        self.change(config)

    @property
    def open(self) -> bool:
        """Whether no key is asked for."""
        return self._open

    def change(self, config: GatewayConfig) -> None:
        """Go by the keys of another configuration.

        Raises:
            ConfigError: its file of keys cannot be read; nothing has changed.
        """
        path = self._file.path if self._file is not None else None
        if config.keys_file != path:
            file = KeyFile(config.keys_file) if config.keys_file is not None else None
            keys: list[VirtualKey] = []
            if file is not None:
                self._mark, keys = file.mark(), file.read()
                if not keys:
                    logger.warning("there are no keys in %s yet: `swarm-gateway keys create` makes one", file.path)
            self._file = file
            self._take(keys)
        self._fixed = _fixed(config.api_keys)
        self._open = not config.api_keys and config.keys_file is None

    def holder(self, key: bytes) -> Holder:
        """Who sent ``key``.

        Raises:
            AuthenticationError: nobody's key, or one that is revoked or expired.
        """
        if self._open:
            return Holder(Caller(), admin=True)
        given = digest(key)
        found: Holder | None = None
        for known, holder in self._fixed.items():
            if hmac.compare_digest(given, known):
                found = holder
        if found is not None:
            return found
        virtual = self._virtual.get(id_of(key))
        if virtual is None or not hmac.compare_digest(given, bytes.fromhex(virtual.sha256)):
            raise AuthenticationError(_WRONG)
        now = datetime.now(UTC)
        if (state := virtual.state(now)) != "active":
            raise AuthenticationError(f"this API key is {state}", code=f"api_key_{state}")
        self._used[virtual.id] = now
        routes = frozenset(virtual.routes) if virtual.routes is not None else None
        return Holder(Caller(virtual.id, routes, virtual.max_in_flight, virtual.label), virtual.admin, virtual)

    def count(self, holder: Holder) -> None:
        """Count a request of ``holder``.

        Raises:
            OverloadedError: it has sent all that it may in a minute.
        """
        key = holder.virtual
        if key is None or key.requests_per_minute is None:
            return
        seconds = self._rates.setdefault(key.id, RequestRate()).take(key.requests_per_minute)
        if seconds > 0:
            raise OverloadedError(
                f"this API key may send {key.requests_per_minute} requests a minute",
                code="rate_limit_exceeded",
                retry_after=seconds,
            )

    async def look(self) -> None:
        """Take over what the file of keys says, if it has changed. One that is wrong is logged once, and leaves the
        keys as they were."""
        file = self._file
        if file is None:
            return
        # it may lie on a disk that hangs
        mark = await asyncio.to_thread(file.mark)
        if mark == self._mark:
            return
        try:
            keys = await asyncio.to_thread(file.read)
        except ConfigError as exc:
            self._complain(f"the file of keys is not taken over: {exc.message}")
            keys = None
        # another configuration may have come meanwhile, with another file
        if file is self._file:
            self._mark = mark
            if keys is not None:
                self._complaint = ""
                self._take(keys)

    async def note(self) -> None:
        """Write down when keys were last used."""
        file, used = self._file, self._used
        self._used = {}
        if not used or file is None:
            return
        try:
            await asyncio.to_thread(file.note_used, used)
        except ConfigError as exc:
            self._complain(f"when keys were last used is not noted: {exc.message}")

    @asynccontextmanager
    async def following(self) -> AsyncGenerator[None]:
        """While inside, the file's changes are taken over and the uses of its keys noted."""
        task = asyncio.create_task(self._follow(), name="following the file of keys")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.note()

    async def _follow(self) -> None:
        noted = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.look()
            if (now := asyncio.get_running_loop().time()) - noted >= _NOTE_SECONDS:
                noted = now
                await self.note()

    def _take(self, keys: Iterable[VirtualKey]) -> None:
        self._virtual = {key.id: key for key in keys}
        self._rates = {name: rate for name, rate in self._rates.items() if name in self._virtual}

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            logger.error("%s", text)


def _fixed(keys: Iterable[SecretStr]) -> dict[bytes, Holder]:
    holders: dict[bytes, Holder] = {}
    for key in keys:
        text = key.get_secret_value()
        hashed = text.startswith(DIGEST_PREFIX)
        known = bytes.fromhex(text.removeprefix(DIGEST_PREFIX)) if hashed else digest(text.encode())
        # applications are told apart by their keys, in queues, sessions and feedback
        holders[known] = Holder(Caller(key_id=f"config-{known.hex()[:8]}"), admin=False)
    return holders
