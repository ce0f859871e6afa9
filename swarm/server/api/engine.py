"""Routes of the engine: its configuration, start, stop and status.

Invariant: a command that cannot be carried out answers with an error that says what to do, never 200. It is
OpenAI-shaped but for one: a job synced too late is answered in AgentJet's words.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarm.agentjet import read_job
from swarm.errors import ConflictError
from swarm.http.asgi import read_model
from swarm.protocol import RefusedResponse, StartEngineResponse, SuccessResponse, SyncTrainConfigRequest
from swarm.server.api.agentjet import StateShown
from swarm.server.api.responses import answer
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.engine.supervisor import Supervisor, check_model

MAX_WAIT = 60.0


@dataclass(frozen=True)
class EngineRoutes:
    """``/sync_train_config``, ``/start_engine``, ``/stop_engine`` and ``/get_engine_status``."""

    config: ServerConfig
    controller: Controller
    supervisor: Supervisor
    shown: StateShown

    def routes(self) -> list[Route]:
        return [
            Route("/sync_train_config", self.sync_train_config, methods=["POST"]),
            Route("/start_engine", self.start_engine, methods=["POST"]),
            Route("/stop_engine", self.stop_engine, methods=["POST"]),
            Route("/get_engine_status", self.get_engine_status, methods=["GET"]),
        ]

    async def sync_train_config(self, request: Request) -> Response:
        wanted = await read_model(request, SyncTrainConfigRequest, self.config.max_body_bytes)
        job = read_job(wanted.yaml_as_string)
        check_model(job)
        try:
            self.controller.sync_job(job)
        except ConflictError as exc:
            refused = RefusedResponse(success=False, error=exc.message, code=exc.code or "conflict")
            return answer(refused, status=400, headers={"x-should-retry": "false"})
        await self.controller.synced()
        return answer(SuccessResponse(success=True))

    async def start_engine(self, request: Request) -> Response:
        pid = await self.supervisor.start()
        # the state that AgentJet's client looks at next must not be the one from before the start
        await asyncio.sleep(self.shown.until_forgotten())
        return answer(StartEngineResponse(success=True, pid=pid))

    async def stop_engine(self, request: Request) -> Response:
        await self.supervisor.stop(for_good=True)
        await self.controller.synced()
        return answer(SuccessResponse(success=True))

    async def get_engine_status(self, request: Request) -> Response:
        exact = "exact" in request.query_params
        return answer(self.controller.engine_status() if exact else self.shown.status())
