"""``/sync_train_code``: training code that an admin sends, for the next engine to import.

Invariant: this runs what it is sent, by design; so it is off unless the operator turned it on, needs the admin scope
(:mod:`swarm.server.auth.scopes`), and changes nothing under a running engine. It answers in AgentJet's words.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from swarm.errors import ConflictError, ForbiddenError, PayloadTooLargeError, RequestError, SwarmGatewayError
from swarm.protocol import RefusedResponse, SyncTrainCodeResponse
from swarm.server.api.responses import answer
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.engine.snapshots import Snapshots
from swarm.states import EngineState

logger = logging.getLogger(__name__)

#: how long the archive may take to arrive
_UPLOAD_SECONDS = 300.0


@dataclass(frozen=True)
class CodeRoutes:
    """``/sync_train_code``. ``BODY_TYPES`` is what :class:`~swarm.http.guard.JsonBodies` must let through to it."""

    BODY_TYPES: ClassVar[Mapping[str, str]] = {"/sync_train_code": "application/zip"}

    config: ServerConfig
    controller: Controller
    snapshots: Snapshots
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    def routes(self) -> list[Route]:
        return [Route("/sync_train_code", self.sync_train_code, methods=["POST"])]

    async def sync_train_code(self, request: Request) -> Response:
        try:
            return answer(await self._sync(request))
        except ClientDisconnect:
            return Response(status_code=499)
        except SwarmGatewayError as exc:
            # "not OFFLINE" is 400 to AgentJet's client
            status = 400 if isinstance(exc, ConflictError) else exc.status
            refused = RefusedResponse(success=False, error=exc.message, code=exc.code or "refused")
            return answer(refused, status=status, headers={"x-should-retry": "false"})

    async def _sync(self, request: Request) -> SyncTrainCodeResponse:
        if not self.config.allow_code_sync:
            raise ForbiddenError(
                "code sync is off, for whoever may send code can run anything on the trainer's machines: to allow it "
                "to admins, set `allow_code_sync: true` in the swarm server's configuration, or "
                "SWARM_ALLOW_CODE_SYNC=true in its environment, and restart it",
                code="code_sync_disabled",
            )
        self._check_offline()
        archive = await _read(request, self.snapshots.limits.max_archive_bytes)
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


async def _read(request: Request, limit: int) -> bytes:
    too_large = PayloadTooLargeError(
        f"the archive is larger than the limit of {limit} bytes: leave out data, checkpoints and environments"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_UPLOAD_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError as exc:
        error = RequestError(f"the archive did not arrive within {_UPLOAD_SECONDS:g} s", code="upload_timeout")
        error.status = 408
        raise error from exc
    return bytes(body)
