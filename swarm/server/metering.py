"""Feeds the meters: from the journal, which gets every record, and around each request.

Invariant: measuring changes nothing, and a request is counted under the path of its route or under ``other``, so
callers cannot make up names.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import Ending, Recovered, Row
from swarm.server.meters import Meters

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"
#: nginx's status for a caller that left before the response
_CALLER_GONE = 499


class MeteredJournal:
    """A journal that counts its rows as they are appended."""

    def __init__(self, journal: Journal, meters: Meters) -> None:
        self._journal = journal
        self._meters = meters

    @property
    def pending(self) -> int:
        return self._journal.pending

    def recover(self) -> Recovered:
        recovered = self._journal.recover()
        if recovered.outstanding is not None:
            # this server will train it, though an earlier one took it
            self._meters.observe(recovered.outstanding)
        return recovered

    def append(self, *rows: Row) -> None:
        self._journal.append(*rows)
        for row in rows:
            self._meters.observe(row)

    async def synced(self) -> None:
        await self._journal.synced()

    async def past_ending(self, episode_uuid: str) -> Ending | None:
        return await self._journal.past_ending(episode_uuid)


class RequestMeter:
    """Counts each request by method, route and status, and measures its duration; the outermost middleware."""

    def __init__(self, app: ASGIApp, meters: Meters) -> None:
        self.app = app
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        status = _CALLER_GONE

        def send_noting_status(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        try:
            await self.app(scope, receive, send_noting_status)
        except Exception:
            status = 500
            raise
        finally:
            method: str = scope["method"]
            route = scope.get("route")
            path = route.path_format if isinstance(route, Route) else _OTHER
            self._meters.request(method if method in _METHODS else _OTHER, path, status, time.monotonic() - began)
