"""Routes of the engine's configuration: take a job, resolve one, and tell what ran.

Invariant: a job that an engine could not run is refused with what is wrong, and changes nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from swarm.errors import ConflictError, NotFoundError
from swarm.protocol import (
    RefusedResponse,
    ResolveConfigRequest,
    ResolvedJob,
    RunRecord,
    RunsResponse,
    SyncTrainConfigRequest,
    SyncTrainConfigResponse,
)
from swarm.server.api.agentjet import refused
from swarm.server.audit import AuditLog
from swarm.server.auth import ControlRoute
from swarm.server.engine.changes import Changes
from swarm.server.engine.history import History

#: why a route that changes what is on disk may be refused for now
BACKLOG = "the journal or the engine cannot take it now; `retry-after` says when to come back"


@dataclass(frozen=True)
class ConfigRoutes:
    """``/sync_train_config`` and ``/config``."""

    changes: Changes
    history: History
    audit: AuditLog

    def routes(self) -> list[BaseRoute]:
        unresolved = {409: "the engine is not ours and does not tell", 500: "the configuration cannot be resolved"}
        return [
            ControlRoute(
                "POST",
                "/sync_train_config",
                self.sync,
                "admin",
                refused=RefusedResponse,
                refusals={500: "the configuration cannot be resolved", 503: BACKLOG},
                response_model=SyncTrainConfigResponse,
            ),
            ControlRoute("POST", "/config/resolve", self.resolve, "admin", refusals=unresolved),
            ControlRoute("GET", "/config", self.runs, "read"),
            ControlRoute("GET", "/config/{number}", self.run, "read"),
        ]

    async def sync(self, request: Request, wanted: SyncTrainConfigRequest) -> SyncTrainConfigResponse | Response:
        """Take a training job (ours or AgentJet's, as YAML) for the next start.

        Keys of verl that it names are checked first. With `force_restart` an engine that runs is stopped for it and
        started again. A job that differs from the one before begins a new training run (`new_run`).
        """
        try:
            async with self.audit.command(request, "config sync") as details:
                details |= {"set": sorted(wanted.set), "restarted": False}
                done = await self.changes.sync_job(wanted.yaml_as_string, wanted.set, force=wanted.force_restart)
                details |= {"restarted": done.restarted, "new_run": done.new_run}
        except ConflictError as exc:
            return refused(exc, 400)
        return done

    async def resolve(self, wanted: ResolveConfigRequest) -> ResolvedJob:
        """verl's complete configuration for a job, and where each value comes from; nothing is started or kept."""
        return await self.changes.resolve(self.changes.layers(wanted.yaml_as_string, wanted.set))

    async def runs(self) -> RunsResponse:
        """What ran."""
        return RunsResponse(runs=await asyncio.to_thread(self.history.all))

    async def run(self, number: str) -> RunRecord:
        """One start of the engine with its job and configuration."""
        if not number.isascii() or not number.isdigit() or len(number) > 9:
            raise NotFoundError(f"there is no run {number[:20]!r}: runs have numbers", code="no_run")
        return await asyncio.to_thread(self.history.record, int(number))
