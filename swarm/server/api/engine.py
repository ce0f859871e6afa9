"""Routes of the engine: its job and what ran, start, stop and status.

Invariant: a command that cannot be carried out is answered with an error that says what to do, never with a 200; a job
that an engine could not run changes nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from swarm.concurrency import until_gone
from swarm.control_protocol import (
    ResolveConfigRequest,
    ResolvedJob,
    RunRecord,
    RunsResponse,
    StartEngineResponse,
    SyncTrainConfigRequest,
    SyncTrainConfigResponse,
)
from swarm.errors import ConflictError, NotFoundError, SwarmGatewayError
from swarm.protocol import RefusedResponse, SuccessResponse
from swarm.server.audit import AuditLog
from swarm.server.auth import ControlRoute, TokenHolder
from swarm.server.engine.changes import Changes
from swarm.server.engine.controller import Controller
from swarm.server.engine.history import History
from swarm.server.engine.runs import MAX_STEPS
from swarm.server.foreign import ForeignClients
from swarm.server.monitor import EPISODES, Monitor, VerboseLog
from swarm.states import EngineState
from swarm.status import EngineStatus, ServerStatus
from swarm.types import TolerantModel

#: why a route that changes what is on disk may be refused for now
BACKLOG = "the journal or the engine cannot take it now; `retry-after` says when to come back"
MAX_WAIT = 60.0
MAX_EPISODES = 10_000


def refused(exc: SwarmGatewayError, status: int) -> Response:
    """A refusal of a job or of code, in AgentJet's words."""
    body = RefusedResponse(success=False, error=exc.message, code=exc.code or "refused")
    return Response(body.model_dump_json(), status, {"x-should-retry": "false"}, media_type="application/json")


class EngineStatusQuery(TolerantModel):
    """The query of ``GET /get_engine_status``."""

    exact: str | None = Field(default=None, description="`1`: the state as it is")


class StatusQuery(TolerantModel):
    """The query of ``GET /status``."""

    wait_state: list[EngineState] = Field(default=[], description="wait for one of these states, or OFFLINE")
    after_change: int | None = Field(default=None, description="wait until `engine_changes` is another number")
    wait_seconds: float = Field(default=0.0, ge=0, le=MAX_WAIT, description="wait at most this long")
    steps: int = Field(default=MAX_STEPS, ge=0, le=MAX_STEPS, description="at most this many recent steps")
    episodes: int = Field(default=EPISODES, ge=0, le=MAX_EPISODES, description="at most this many running episodes")


@dataclass(frozen=True)
class EngineRoutes:
    """``/start_engine``, ``/stop_engine``, ``/get_engine_status`` and ``/status``."""

    controller: Controller
    changes: Changes
    foreign: ForeignClients
    monitor: Monitor
    audit: AuditLog

    def routes(self) -> list[BaseRoute]:
        backlog = {503: BACKLOG}
        not_startable = {409: "there is no job, or the engine is not OFFLINE"}
        return [
            ControlRoute("POST", "/start_engine", self.start_engine, "admin", refusals=not_startable | backlog),
            ControlRoute("POST", "/stop_engine", self.stop_engine, "admin", refusals=backlog),
            ControlRoute("GET", "/get_engine_status", self.get_engine_status, "read"),
            ControlRoute("GET", "/status", self.status, "read"),
        ]

    async def start_engine(self, request: Request) -> StartEngineResponse:
        """Start the engine with the synced job."""
        async with self.audit.command(request, "engine start"):
            pid = await self.changes.start()
        # a client with a cache must not see the state from before the start when it looks next
        await asyncio.sleep(self.foreign.until_forgotten())
        return StartEngineResponse(success=True, pid=pid)

    async def stop_engine(self, request: Request) -> SuccessResponse:
        """Stop the engine."""
        async with self.audit.command(request, "engine stop"):
            await self.changes.stop()
        return SuccessResponse(success=True)

    async def get_engine_status(self, query: EngineStatusQuery) -> EngineStatus:
        """State of the engine, for AgentJet's clients.

        It stays WEIGHT_SYNCING for some seconds after clients agreed to a sync.
        """
        return self.foreign.status() if query.exact is None else self.controller.engine_status()

    async def status(self, request: Request, query: StatusQuery) -> ServerStatus:
        """Everything that a monitor shows, now or once something has changed."""
        engine, seconds = self.controller.engine, query.wait_seconds
        if query.wait_state and seconds:
            await until_gone(request.receive, engine.wait_for_state(query.wait_state, seconds))
        elif query.after_change is not None and seconds:
            await until_gone(request.receive, engine.wait_for_change(query.after_change, seconds))
        caller: TokenHolder = request.scope["caller"]
        status = self.monitor.status(steps=query.steps, episodes=query.episodes, whole_uuids=caller.sees_uuids)
        if self.changes.defaults:
            status = status.model_copy(update={"job_defaults": self.changes.defaults})
        return status


@dataclass(frozen=True)
class ConfigRoutes:
    """``/sync_train_config`` and ``/config``."""

    changes: Changes
    history: History
    audit: AuditLog
    log: VerboseLog

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
                done = await self.changes.sync_job(
                    wanted.yaml_as_string, wanted.set, force=wanted.force_restart, from_step=wanted.from_step
                )
                details |= {"restarted": done.restarted, "new_run": done.new_run}
        except ConflictError as exc:
            return refused(exc, 400)
        if done.ignored:
            # AgentJet's clients do not show the answer; their monitor shows this
            self.log.push("job", f"without effect here: {', '.join(done.ignored)}")
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
