"""``/sync_train_code``: training code that an admin sends, for the next engine to import.

Invariant: the engine runs what is sent here, by design; so this is off unless the operator turned it on, needs the
admin scope, and changes nothing under a running engine. It answers in AgentJet's words.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from swarm.errors import ConflictError, ForbiddenError, SwarmGatewayError
from swarm.http.asgi import read_body
from swarm.protocol import RefusedResponse, SyncTrainCodeResponse
from swarm.server.api.agentjet import refused
from swarm.server.auth.scopes import ControlRoute
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.engine.snapshots import Snapshots
from swarm.states import EngineState

logger = logging.getLogger(__name__)

PATH = "/sync_train_code"
_ZIP = "application/zip"


@dataclass(frozen=True)
class CodeRoutes:
    """``/sync_train_code``. ``BODY_TYPES`` is what :class:`~swarm.http.guard.JsonBodies` must let through to it."""

    BODY_TYPES: ClassVar[Mapping[str, str]] = {PATH: _ZIP}

    config: ServerConfig
    controller: Controller
    snapshots: Snapshots
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    def routes(self) -> list[BaseRoute]:
        content = {_ZIP: {"schema": {"type": "string", "format": "binary"}}}
        return [
            ControlRoute(
                "POST",
                PATH,
                self.sync_train_code,
                "admin",
                refused=RefusedResponse,
                refusals={500: "the code cannot be stored"},
                extra={"requestBody": {"required": True, "content": content}},
                response_model=SyncTrainCodeResponse,
            )
        ]

    async def sync_train_code(self, request: Request) -> SyncTrainCodeResponse | Response:
        """Take code, as a zip, that the next engine imports first."""
        try:
            return await self._sync(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except SwarmGatewayError as exc:
            # AgentJet's client expects 400 for "not OFFLINE"
            return refused(exc, 400 if isinstance(exc, ConflictError) else exc.status)

    async def _sync(self, request: Request) -> SyncTrainCodeResponse:
        if not self.config.allow_code_sync:
            raise ForbiddenError(
                "code sync is off, because whoever may send code can run anything on the trainer's machines: to allow "
                "it to admins, set `allow_code_sync: true` in the swarm server's configuration, or "
                "SWARM_ALLOW_CODE_SYNC=true in its environment, and restart it",
                code="code_sync_disabled",
            )
        self._check_offline()
        archive = bytes(await read_body(request.scope, request.receive))
        async with self._one_at_a_time:
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
