"""The accepted keys, their owners and their rates, and the middleware that checks the key of every request. Only
digests of keys are held, compared in constant time.

Invariant: behind the middleware, ``scope["state"]["caller"]`` is the owner of the request; only ``/health`` is open to
everyone. A ring that was made for keys is never open, whatever happens to their file; a revoked key opens nothing
:data:`POLL_SECONDS` later. In no window of sixty seconds does a key send more requests than allowed, and a refused one
does not count.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from pydantic import SecretStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapters.dialects import dialect_of
from adapters.dialects.jsons import encode
from gateway.config.gateway import DIGEST_PREFIX, GatewayConfig
from gateway.data.consent import Refusals
from gateway.keys.store import KeyFile, VirtualKey
from gateway.observability.request import note
from gateway.types import Caller
from swarm.concurrency import end_tasks
from swarm.credentials import RepeatedReads, Ring, append_audit, digest, matching
from swarm.errors import (
    AuthenticationError,
    ConfigError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    OverloadedError,
    RequestError,
    SwarmGatewayError,
)
from swarm.http.asgi import bearer_bytes, error_response

logger = logging.getLogger(__name__)

#: Interval at which the file of virtual keys is read.
POLL_SECONDS = 1.0
#: Reads of the file between two writes of when keys were last used.
_LOOKS_PER_NOTE = 30
_RATE_WINDOW = 60.0
_ADMIN = "/admin"
#: Refusals that the audit log takes of one key, and of all callers without a known one: others can fill no disk.
_REFUSALS_PER_MINUTE = 60
#: Figures of all routes.
_OPERATORS = ("/status", "/metrics")
_MOST_NAME = 200
#: Probes of whether the process answers need no key.
OPEN = ("/health", "/ping")


@dataclass(frozen=True, slots=True)
class Holder:
    """The owner of a key; ``virtual`` is ``None`` for keys of the configuration and in a gateway without keys."""

    caller: Caller
    admin: bool
    virtual: VirtualKey | None = None


class RequestRate:
    """The last minute of one key; ``clock`` gives seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moments: deque[float] = deque()

    def take(self, limit: int) -> float:
        """Count one more request if there may be ``limit`` a minute.

        Returns:
            0 when it was counted, else the seconds until there is room for it.
        """
        now = self._clock()
        while self._moments and self._moments[0] <= now - _RATE_WINDOW:
            self._moments.popleft()
        if len(self._moments) < limit:
            self._moments.append(now)
            return 0.0
        # after the limit was lowered, the window may hold too many requests: wait until enough of them have expired
        return self._moments[len(self._moments) - limit] + _RATE_WINDOW - now


class KeyRing:
    """The accepted keys of one gateway; one without ``api_keys`` and ``keys_file`` accepts everyone as its operator.

    Attributes:
        refusals: the keys and sessions that said no.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._fixed: dict[bytes, Holder] = {}
        self._file: KeyFile | None = None
        self._virtual: Ring[VirtualKey] | None = None
        self.refusals = Refusals(None)
        self._rates: dict[str, RequestRate] = {}
        self._used: dict[str, datetime] = {}
        self._complaint = ""
        #: by who was refused
        self._refused: dict[str, RequestRate] = {}
        self._reads = RepeatedReads()
        self.change(config)

    @property
    def open(self) -> bool:
        """Whether requests need no key."""
        return not self._fixed and self._virtual is None

    def change(self, config: GatewayConfig) -> None:
        """Switch to the keys of another configuration.

        Raises:
            ConfigError: its file of keys, or of refusals, cannot be read; nothing has changed.
        """
        if config.keys_file is None:
            self._file = self._virtual = None
        elif self._file is None or config.keys_file != self._file.path:
            file = KeyFile(config.keys_file)
            refusals = Refusals(file.refusals_path, self.refusals)
            self._virtual, self.refusals, self._file = Ring(file), refusals, file
            if not self._virtual.credentials:
                logger.warning("there are no keys in %s yet: `swarm-gateway keys create` makes one", file.path)
        self._fixed = _fixed(config.api_keys)

    def holder(self, key_digest: bytes) -> Holder:
        """The owner of the key with the SHA-256 ``key_digest``.

        Raises:
            AuthenticationError: an unknown key, or one that is revoked or expired.
        """
        if self.open:
            return Holder(Caller(), admin=True)
        virtual = self._virtual.find(key_digest) if self._virtual is not None else None
        fixed = matching(key_digest, self._fixed)
        if fixed is not None:
            return fixed
        if virtual is None:
            raise AuthenticationError(
                "wrong or missing API key: send one of the gateway's keys as `Authorization: Bearer ...` or `x-api-key`"
            )
        now = datetime.now(UTC)
        if (state := virtual.state(now)) != "active":
            raise AuthenticationError(f"this API key is {state}", code=f"api_key_{state}")
        self._used[virtual.id] = now
        routes = frozenset(virtual.routes) if virtual.routes is not None else None
        caller = Caller(virtual.id, routes, virtual.max_in_flight, virtual.label, virtual.train, virtual.side)
        return Holder(caller, virtual.admin, virtual)

    async def opt_out(self, key_id: str, session: str) -> bool:
        """Keep and train nothing more of a key, of a session, or of a key's session; whether that is new.

        Raises:
            RequestError: neither is named.
            NotFoundError: there is no such key.
            ConflictError: it cannot be written down; then it does not hold.
        """
        if not (key_id or session):
            raise RequestError("say who opts out: name a key, a session or both", param="key")
        credentials = self._virtual.credentials if self._virtual is not None else ()
        if key_id not in {
            "",
            *(key.id for key in credentials),
            *(holder.caller.key_id for holder in self._fixed.values()),
        }:
            raise NotFoundError(
                f"there is no key {key_id[:40]!r}: `swarm-gateway keys list` has the ids", code="key_not_found"
            )
        if self.refusals.refuses(key_id, session):
            return False
        try:
            await self.refusals.add(key_id, session)
        except ConfigError as exc:
            raise ConflictError(f"{exc.message}: nobody has opted out") from exc
        return True

    def count(self, holder: Holder) -> None:
        """Count a request of ``holder``.

        Raises:
            OverloadedError: it has used up its requests per minute.
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
        """Read the files of keys and of refusals, if they have changed."""
        if self._virtual is not None:
            # in a thread: the disk may hang
            await asyncio.to_thread(self._virtual.refresh)
            await self.refusals.refresh()

    async def note(self) -> None:
        """Write when keys were last used."""
        file, used = self._file, self._used
        self._used = {}
        if not used or file is None:
            return
        try:
            await asyncio.to_thread(file.note_used, used)
        except ConfigError as exc:
            if exc.message != self._complaint:
                self._complaint = exc.message
                logger.error("cannot write when keys were last used: %s", exc.message)

    async def audit(self, entry: Mapping[str, Any], *, admitted: bool = True) -> None:
        """Append to the audit log, which is beside the file of keys; without one, nobody commands.

        Args:
            admitted: whether who asked may command.
        """
        if self._file is None:
            return
        if not admitted and self._refused.setdefault(entry["who"], RequestRate()).take(_REFUSALS_PER_MINUTE) > 0:
            return
        await append_audit(self._file.audit_path, entry)

    async def audit_read(self, who: str, what: str) -> None:
        """Note in the audit log that somebody reads texts, once a minute."""
        if self._reads.due({"who": who, "what": what}):
            await self.audit({"who": who, "what": what, "result": "done"})

    @asynccontextmanager
    async def following(self) -> AsyncGenerator[None]:
        """Inside, the file is read again when it changes, and the use of its keys is written."""
        task = asyncio.create_task(self._follow(), name="following the file of keys")
        try:
            yield
        finally:
            await end_tasks(task)
            await self.note()

    async def _follow(self) -> None:
        for looks in itertools.count(1):
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self.look()
                if looks % _LOOKS_PER_NOTE == 0:
                    await self.note()
            except RuntimeError as exc:  # the system has no room for another thread
                logger.error("the files of keys and refusals are read again in a second: %s", exc)


class KeyMiddleware:
    """Refuses with 401, 403 or 429, in the dialect of the path.

    Args:
        exempt: path whose routes check who calls themselves, as those below it do; empty: none.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, exempt: str = "") -> None:
        self.app = app
        self._keys = keys
        self._exempt = exempt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # a browser asks without a key what it may send, which no endpoint answers
        is_open = scope["type"] != "http" or scope["method"] == "OPTIONS" or scope["path"] in OPEN
        if is_open or (self._exempt and f"{scope['path']}/".startswith(f"{self._exempt}/")):
            await self.app(scope, receive, send)
            return
        who, admitted = "", False
        if scope["path"].startswith(_ADMIN):
            send = self._audited(scope, lambda: (who, admitted), send)
        try:
            # keys are compared as bytes
            holder = self._keys.holder(digest(bearer_bytes(scope["headers"])))
            who = holder.caller.label or holder.caller.key_id
            _check(scope["path"], holder)
            if scope["method"] not in ("GET", "HEAD"):
                self._keys.count(holder)
            admitted = True
        except SwarmGatewayError as exc:
            dialect = dialect_of(scope["path"], scope["headers"])
            await error_response(exc, encode(dialect.error(exc)))(scope, receive, send)
            return
        caller = holder.caller
        scope.setdefault("state", {})["caller"] = caller
        note(key=caller.key_id)
        if caller.train is False or self._keys.refusals.refuses(caller.key_id):
            note(texts=False)
        await self.app(scope, receive, send)

    def _audited(self, scope: Scope, caller: Callable[[], tuple[str, bool]], send: Send) -> Send:
        """``send`` that first notes commands and refusals: who sent what, from where, and with which status."""

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and (scope["method"] != "GET" or message["status"] >= 400):
                asked = parse_qs(scope["query_string"].decode("latin-1"))
                who, admitted = caller()
                entry = {
                    "who": who,
                    "from": (scope.get("client") or [""])[0],
                    "what": f"{scope['method']} {scope['path'][:_MOST_NAME]}",
                    "route": asked.get("route", [""])[0][:_MOST_NAME],
                    "result": message["status"],
                }
                await self._keys.audit(entry, admitted=admitted)
            await send(message)

        return noting


def _fixed(keys: Iterable[SecretStr]) -> dict[bytes, Holder]:
    holders: dict[bytes, Holder] = {}
    for key in keys:
        text = key.get_secret_value()
        hashed = text.startswith(DIGEST_PREFIX)
        key_digest = bytes.fromhex(text.removeprefix(DIGEST_PREFIX)) if hashed else digest(text)
        # the id tells applications apart in sessions and feedback
        holders[key_digest] = Holder(Caller(key_id=f"config-{key_digest.hex()[:8]}"), admin=False)
    return holders


def _check(path: str, holder: Holder) -> None:
    if path.startswith(_ADMIN) and not holder.admin:
        raise ForbiddenError(
            "only a key that was made with `swarm-gateway keys create --admin` opens /admin", code="admin_key_required"
        )
    if path.startswith(_OPERATORS) and holder.caller.routes is not None and not holder.admin:
        raise ForbiddenError(f"a key for some routes does not open {path}", code="forbidden")
