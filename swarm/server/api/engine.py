"""Routes of the engine: its job and code, start, stop and status.

Invariant: a command that cannot be carried out is answered with an error that says what to do, never with a 200. Errors
are OpenAI-shaped; jobs and code are refused in AgentJet's words. The engine runs the code that it is sent, by design;
so code sync is off unless the operator turned it on, needs the admin scope, and changes nothing under a running engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from swarm.agentjet import read_job
from swarm.errors import ConflictError, ForbiddenError, SwarmGatewayError
from swarm.http.asgi import read_body
from swarm.protocol import (
    EngineStatus,
    RefusedResponse,
    ServerStatus,
    StartEngineResponse,
    SuccessResponse,
    SyncTrainCodeResponse,
    SyncTrainConfigRequest,
)
from swarm.server.api.agentjet import StateShown, refused, sees_uuids
from swarm.server.auth import ControlRoute
from swarm.server.concurrency import ClientGoneError, until_gone
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.engine.runs import MAX_STEPS
from swarm.server.engine.snapshots import Snapshots
from swarm.server.engine.supervisor import Supervisor, check_model
from swarm.server.monitor import EPISODES, Monitor
from swarm.states import EngineState

logger = logging.getLogger(__name__)

#: code is sent as a zip to this path
CODE_PATH, CODE_TYPE = "/sync_train_code", "application/zip"
MAX_WAIT = 60.0
MAX_EPISODES = 10_000
#: why a route that changes what is on disk may be refused for now
BACKLOG = "the journal or the engine cannot take it now; `retry-after` says when to come back"


@dataclass(frozen=True)
class EngineRoutes:
    """``/sync_train_*``, ``/start_engine``, ``/stop_engine``, ``/get_engine_status`` and ``/status``."""

    config: ServerConfig
    controller: Controller
    supervisor: Supervisor
    snapshots: Snapshots
    shown: StateShown
    monitor: Monitor
    _one_code_sync: asyncio.Lock = field(default_factory=asyncio.Lock)

    def routes(self) -> list[BaseRoute]:
        backlog = {503: BACKLOG}
        binary = {"type": "string", "format": "binary"}
        not_startable = {409: "there is no job, or the engine is not OFFLINE"}
        return [
            ControlRoute(
                "POST",
                "/sync_train_config",
                self.sync_train_config,
                "admin",
                refused=RefusedResponse,
                refusals=backlog,
                response_model=SuccessResponse,
            ),
            ControlRoute(
                "POST",
                CODE_PATH,
                self.sync_train_code,
                "admin",
                refused=RefusedResponse,
                refusals={500: "the code cannot be stored"},
                extra={"requestBody": {"required": True, "content": {CODE_TYPE: {"schema": binary}}}},
                response_model=SyncTrainCodeResponse,
            ),
            ControlRoute("POST", "/start_engine", self.start_engine, "admin", refusals=not_startable | backlog),
            ControlRoute("POST", "/stop_engine", self.stop_engine, "admin", refusals=backlog),
            ControlRoute("GET", "/get_engine_status", self.get_engine_status, "read"),
            ControlRoute("GET", "/status", self.status, "read", response_model=ServerStatus),
        ]

    async def sync_train_config(self, wanted: SyncTrainConfigRequest) -> SuccessResponse | Response:
        """Take a training job (ours or AgentJet's, as YAML) for the next start."""
        job = read_job(wanted.yaml_as_string)
        check_model(job)
        try:
            self.controller.sync_job(job)
        except ConflictError as exc:
            return refused(exc, 400)
        await self.controller.synced()
        return SuccessResponse(success=True)

    async def sync_train_code(self, request: Request) -> SyncTrainCodeResponse | Response:
        """Take code, as a zip, that the next engine imports first."""
        try:
            return await self._sync_code(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except SwarmGatewayError as exc:
            # AgentJet's client expects 400 for "not OFFLINE"
            return refused(exc, 400 if isinstance(exc, ConflictError) else exc.status)

    async def _sync_code(self, request: Request) -> SyncTrainCodeResponse:
        if not self.config.allow_code_sync:
            raise ForbiddenError(
                "code sync is off, because whoever may send code can run anything on the trainer's machines: to allow "
                "it to admins, set `allow_code_sync: true` in the swarm server's configuration, or "
                "SWARM_ALLOW_CODE_SYNC=true in its environment, and restart it",
                code="code_sync_disabled",
            )
        self._check_offline()
        archive = bytes(await read_body(request.receive))
        async with self._one_code_sync:
            try:
                snapshot = await asyncio.to_thread(self.snapshots.add, archive)
                # an engine may have been started meanwhile
                self._check_offline()
                await asyncio.to_thread(self.snapshots.select, snapshot)
            except OSError as exc:
                raise SwarmGatewayError(f"the code cannot be stored: {exc.strerror or exc}", code="disk") from exc
        logger.info("code synced to %s: an engine that starts from now on runs it, or does not start", snapshot)
        message = "the next engine imports from this folder first, or does not start"
        return SyncTrainCodeResponse(success=True, temp_ajet_code_path=str(snapshot), message=message)

    def _check_offline(self) -> None:
        if self.controller.state is not EngineState.OFFLINE:
            raise ConflictError(
                f"the engine is {self.controller.state}: stop it (POST /stop_engine) before you change its code",
                code="engine_not_offline",
            )

    async def start_engine(self) -> StartEngineResponse:
        """Start the engine with the synced job."""
        pid = await self.supervisor.start()
        # AgentJet's client must not see the state from before the start when it looks next
        await asyncio.sleep(self.shown.until_forgotten())
        return StartEngineResponse(success=True, pid=pid)

    async def stop_engine(self) -> SuccessResponse:
        """Stop the engine."""
        await self.supervisor.stop(for_good=True)
        await self.controller.synced()
        return SuccessResponse(success=True)

    async def get_engine_status(
        self, exact: Annotated[str | None, Query(description="`1`: the state as it is")] = None
    ) -> EngineStatus:
        """State of the engine, for AgentJet's clients.

        It stays WEIGHT_SYNCING for some seconds after clients agreed to a sync.
        """
        return self.shown.status() if exact is None else self.controller.engine_status()

    async def status(
        self,
        request: Request,
        wait_state: Annotated[list[EngineState], Query(description="wait for one of these states, or OFFLINE")] = [],  # noqa: B006 - FastAPI copies it
        after_change: Annotated[int | None, Query(description="wait until `engine_changes` is another number")] = None,
        wait_seconds: Annotated[float, Query(ge=0, le=MAX_WAIT, description="wait at most this long")] = 0.0,
        steps: Annotated[int, Query(ge=0, le=MAX_STEPS, description="at most this many recent steps")] = MAX_STEPS,
        episodes: Annotated[
            int, Query(ge=0, le=MAX_EPISODES, description="at most this many running episodes")
        ] = EPISODES,
    ) -> ServerStatus | Response:
        """Everything that a monitor shows, now or once something has changed."""
        waiting: Coroutine[Any, Any, Any] | None = None
        if wait_state and wait_seconds:
            waiting = self.controller.wait_for_state(wait_state, wait_seconds)
        elif after_change is not None and wait_seconds:
            waiting = self.controller.wait_for_change(after_change, wait_seconds)
        if waiting is not None:
            try:
                await until_gone(request.receive, waiting)
            except ClientGoneError:
                return Response(status_code=499)
        return self.monitor.status(steps=steps, episodes=episodes, whole_uuids=sees_uuids(request))
