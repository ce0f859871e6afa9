"""Routes of ends that several servers share: prepare, commit, cancel, and what was decided.

Invariant: all of them may be repeated; what an answer tells is on disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarm.errors import RequestError
from swarm.protocol import (
    MAX_NAME,
    GroupEndDecision,
    GroupEndRequest,
    PreparedGroupEnds,
    PrepareGroupEndRequest,
    SuccessResponse,
)
from swarm.server.auth import ClientNames
from swarm.server.config import ServerConfig
from swarm.server.prepared import PreparedGroups
from swarm.server.routes.answer import OfClientT, answer, read_as_client


@dataclass(frozen=True)
class PreparedRoutes:
    """``/prepare_group_end``, ``/commit_group_end``, ``/cancel_group_end``, ``/group_end_decision`` and
    ``/prepared_group_ends``."""

    config: ServerConfig
    prepared: PreparedGroups
    names: ClientNames

    def routes(self) -> list[Route]:
        return [
            Route("/prepare_group_end", self.prepare, methods=["POST"]),
            Route("/commit_group_end", self.commit, methods=["POST"]),
            Route("/cancel_group_end", self.cancel, methods=["POST"]),
            Route("/group_end_decision", self.decision, methods=["GET"]),
            Route("/prepared_group_ends", self.undecided, methods=["GET"]),
        ]

    async def prepare(self, request: Request) -> Response:
        await self.prepared.prepare(await self._read(request, PrepareGroupEndRequest))
        return answer(SuccessResponse(success=True))

    async def commit(self, request: Request) -> Response:
        wanted = await self._read(request, GroupEndRequest)
        dropped = await self.prepared.commit(wanted.client_uuid, wanted.transaction)
        return answer(SuccessResponse(success=True, error=f"not trained: {dropped}" if dropped else None))

    async def cancel(self, request: Request) -> Response:
        wanted = await self._read(request, GroupEndRequest)
        await self.prepared.cancel(wanted.client_uuid, wanted.transaction)
        return answer(SuccessResponse(success=True))

    async def decision(self, request: Request) -> Response:
        transaction = request.query_params.get("transaction", "")
        if not 0 < len(transaction) <= MAX_NAME:
            raise RequestError(f"transaction is a name of 1 to {MAX_NAME} characters", param="transaction")
        return answer(GroupEndDecision(decision=await self.prepared.decision(transaction)))

    async def undecided(self, request: Request) -> Response:
        return answer(PreparedGroupEnds(prepared=self.prepared.undecided()))

    async def _read(self, request: Request, model: type[OfClientT]) -> OfClientT:
        return await read_as_client(request, model, self.config.max_body_bytes, self.names)
