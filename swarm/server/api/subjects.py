"""``/data``: what is kept of a person, a copy of it, and its deletion.

Invariant: only the admin scope comes here, and the audit log says who did; it names the subject, no texts.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from swarm.server.api.engine import BACKLOG
from swarm.server.audit import AuditLog
from swarm.server.auth import ControlRoute
from swarm.server.engine.controller import Controller
from swarm.server.journal.episode_rows import Row, rows_of
from swarm.server.journal.erasure import note_export
from swarm.subjects import DataReport, Subject

_LINES = "application/jsonl"


@dataclass(frozen=True)
class DataRoutes:
    """``/data/report``, ``/data/export`` and ``/data/delete``; what is named fits all of what is given."""

    journal: Path
    controller: Controller
    audit: AuditLog

    def routes(self) -> list[BaseRoute]:
        busy = {503: BACKLOG}
        return [
            ControlRoute("GET", "/data/report", self.report, "admin", refusals=busy),
            ControlRoute("GET", "/data/export", self.export, "admin", media_types=[_LINES]),
            ControlRoute("POST", "/data/delete", self.delete, "admin", refusals=busy),
        ]

    async def report(self, request: Request, query: Subject) -> DataReport:
        """What there is of a subject, and the policy versions that learned from it."""
        async with self._audited(request, "data report", query):
            return await self.controller.run.journal.report(query)

    async def export(self, request: Request, query: Subject) -> Response:
        """Its episodes that are over, as JSON lines like those of `swarm-gateway swarm export`."""
        async with self._audited(request, "data export", query):
            rows = await asyncio.to_thread(self._rows, query, request.scope["caller"].name)
        return Response("".join(json.dumps(row) + "\n" for row in rows), media_type=_LINES)

    async def delete(self, request: Request, query: Subject) -> DataReport:
        """Delete all that was begun for a subject until now; what there was. Other requests wait meanwhile."""
        async with self._audited(request, "data delete", query) as details:
            done = await self.controller.episodes.erase(query)
            details |= {"episodes": sum(done.episodes.values())}
        return done

    def _rows(self, subject: Subject, caller: str) -> list[Row]:
        note_export(self.journal, f"what was sent to {caller} for `data export`")
        return rows_of(self.journal, subject)

    def _audited(self, request: Request, what: str, subject: Subject):
        return self.audit.command(request, what, dict(subject.names()))
