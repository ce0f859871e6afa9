"""``/data``: what is kept of a person, a copy of it, and its deletion.

Invariant: only the admin scope comes here, and the audit log says who did; it names the subject, no texts.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Query
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

_Key = Annotated[str, Query(max_length=200, description="id of a gateway's key")]
_Session = Annotated[str, Query(max_length=500, description="name of a conversation")]
_User = Annotated[str, Query(max_length=200, description="digest of a user's name")]
_RequestId = Annotated[str, Query(max_length=500)]


def _subject(key: _Key = "", session: _Session = "", user: _User = "", request_id: _RequestId = "") -> Subject:
    return Subject(key=key, session=session, user=user, request_id=request_id)


_Named = Annotated[Subject, Depends(_subject)]


@dataclass(frozen=True)
class DataRoutes:
    """``/data/report``, ``/data/export`` and ``/data/delete``; what is named fits all of what is given."""

    journal: Path
    controller: Controller
    audit: AuditLog

    def routes(self) -> list[BaseRoute]:
        busy = {503: BACKLOG}
        return [
            ControlRoute("GET", "/data/report", self.report, "admin", refusals=busy, response_model=DataReport),
            ControlRoute("GET", "/data/export", self.export, "admin", response_class=Response),
            ControlRoute("POST", "/data/delete", self.delete, "admin", refusals=busy, response_model=DataReport),
        ]

    async def report(self, request: Request, subject: _Named) -> DataReport:
        """What there is of a subject, and the policy versions that learned from it."""
        async with self._audited(request, "data report", subject):
            return await self.controller.run.journal.report(subject)

    async def export(self, request: Request, subject: _Named) -> Response:
        """Its episodes that are over, as JSON lines like those of `swarm-gateway swarm export`."""
        async with self._audited(request, "data export", subject):
            rows = await asyncio.to_thread(self._rows, subject, request.scope["caller"].name)
        return Response("".join(json.dumps(row) + "\n" for row in rows), media_type="application/jsonl")

    async def delete(self, request: Request, subject: _Named) -> DataReport:
        """Delete all that was begun for a subject until now; what there was. Other requests wait meanwhile."""
        async with self._audited(request, "data delete", subject) as details:
            done = await self.controller.episodes.erase(subject)
            details |= {"episodes": sum(done.episodes.values())}
        return done

    def _rows(self, subject: Subject, caller: str) -> list[Row]:
        note_export(self.journal, f"what was sent to {caller} for `data export`")
        return rows_of(self.journal, subject)

    def _audited(self, request: Request, what: str, subject: Subject):
        return self.audit.command(request, what, dict(subject.names()))
