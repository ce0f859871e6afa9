"""Routes of synced code: take it, list it, hand it out, go back to an earlier one.

Invariant: the engine runs the code that it is sent, by design; so code sync is off unless the operator turned it on,
needs the admin scope, and changes nothing under a running engine. Refusals are in AgentJet's words.
"""

from __future__ import annotations

import asyncio
import io
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from swarm.control_protocol import CodeStatus, SelectCodeRequest, SyncTrainCodeResponse
from swarm.errors import ConflictError, ForbiddenError, SwarmGatewayError
from swarm.http.asgi import read_body
from swarm.protocol import RefusedResponse
from swarm.server.api.engine import refused
from swarm.server.audit import AuditLog, sender_of
from swarm.server.auth import ControlRoute, TokenHolder
from swarm.server.config import ServerConfig
from swarm.server.engine.changes import Changes
from swarm.server.engine.snapshots import Snapshots
from swarm.server.foreign import ForeignClients
from swarm.server.monitor import VerboseLog

#: code is sent as a zip to this path
CODE_PATH, CODE_TYPE = "/sync_train_code", "application/zip"
_MOST_TEXT = 1000


def flag(request: Request, name: str) -> bool:
    """Whether a query parameter is ``1`` or ``true``."""
    return request.query_params.get(name, "") in ("1", "true")


@dataclass(frozen=True)
class CodeRoutes:
    """``/sync_train_code`` and ``/code``."""

    config: ServerConfig
    changes: Changes
    snapshots: Snapshots
    audit: AuditLog
    log: VerboseLog
    foreign: ForeignClients

    def routes(self) -> list[BaseRoute]:
        binary = {"type": "string", "format": "binary"}
        texts = ("force_restart", "message", "revision", "sender")
        query = [{"name": name, "in": "query", "required": False, "schema": {"type": "string"}} for name in texts]
        archive = {"parameters": query, "requestBody": {"required": True, "content": {CODE_TYPE: {"schema": binary}}}}
        change = partial(
            ControlRoute,
            "POST",
            scope="admin",
            refused=RefusedResponse,
            refusals={500: "the code cannot be stored"},
        )
        return [
            change(CODE_PATH, self.sync, extra=archive),
            change("/code/select", self.select),
            ControlRoute("GET", "/code", self.code, "read"),
            ControlRoute("GET", "/code/{id}", self.archive, "admin", media_types=[CODE_TYPE]),
        ]

    async def sync(self, request: Request) -> SyncTrainCodeResponse | Response:
        """Take code, as a zip, that the next engine imports first.

        With `force_restart=1` an engine that runs is stopped for it and started again, with the same job. The same
        content as before changes nothing.
        """
        try:
            async with self.audit.command(request, "code sync") as details:
                self._check_enabled()
                archive = bytes(await read_body(request.receive))
                caller: TokenHolder = request.scope["caller"]
                sent = {name: request.query_params.get(name, "")[:_MOST_TEXT] for name in ("revision", "message")}
                sent["sender"] = sender_of(request) or caller.name
                done = await self.changes.sync_code(archive, force=flag(request, "force_restart"), **sent)
                details |= _change_details(done)
                if why := await asyncio.to_thread(self.foreign.without_effect, Path(done.temp_ajet_code_path)):
                    # AgentJet's clients do not show the answer; their monitor shows this
                    self.log.push("code", why)
                    done = done.model_copy(update={"message": f"{done.message}. But {why}"})
                return done
        except SwarmGatewayError as exc:
            # AgentJet's client expects 400 for "not OFFLINE"
            return refused(exc, 400 if isinstance(exc, ConflictError) else exc.status)

    async def select(self, request: Request, wanted: SelectCodeRequest) -> SyncTrainCodeResponse | Response:
        """Let the next engine import an earlier snapshot again."""
        try:
            async with self.audit.command(request, "code select") as details:
                self._check_enabled()
                done = await self.changes.select_code(wanted.id, force=wanted.force_restart)
                details |= _change_details(done)
                return done
        except SwarmGatewayError as exc:
            return refused(exc, exc.status)

    async def code(self) -> CodeStatus:
        """The code that clients have sent, which is selected, and which runs."""
        return await self.changes.code()

    async def archive(self, id: str) -> Response:
        """The files of one snapshot, as a zip."""
        return Response(await asyncio.to_thread(self._packed, id), media_type=CODE_TYPE)

    def _packed(self, snapshot: str) -> bytes:
        stored = self.snapshots.named(snapshot)
        folder = self.snapshots.files(stored.id)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6, strict_timestamps=False) as writer:
            for name in sorted(stored.files):
                # with its modes, as it was sent: its digest has them
                writer.write(folder / name, name)
        return buffer.getvalue()

    def _check_enabled(self) -> None:
        if not self.config.allow_code_sync:
            raise ForbiddenError(
                "code sync is off, because whoever may send code can run anything on the trainer's machines: to allow "
                "it to admins, set `allow_code_sync: true` in the swarm server's configuration, or "
                "SWARM_ALLOW_CODE_SYNC=true in its environment, and restart it",
                code="code_sync_disabled",
            )


def _change_details(done: SyncTrainCodeResponse) -> dict[str, object]:
    snapshot = done.snapshot
    return {
        "snapshot": snapshot and snapshot.id,
        "revision": snapshot and snapshot.revision,
        "message": snapshot and snapshot.message,
        "changed": done.changed,
        "restarted": done.restarted,
    }
