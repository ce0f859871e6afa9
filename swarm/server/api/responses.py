"""One way to answer with a wire model, and one to read the body of who acts for a client.

Invariant: nobody acts for a client whose name is another token's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from swarm.http.asgi import read_model
from swarm.protocol import (
    AbortEpisodeRequest,
    AgreeSyncWeightRequest,
    ClaimEpisodeRequest,
    ClaimGroupRequest,
    EndEpisodeRequest,
    EndGroupRequest,
    EpisodeRequest,
    WithdrawClaimRequest,
)
from swarm.server.auth import ClientNames
from swarm.types import Model

OfClientT = TypeVar(
    "OfClientT",
    AbortEpisodeRequest,
    WithdrawClaimRequest,
    ClaimEpisodeRequest,
    ClaimGroupRequest,
    EndEpisodeRequest,
    EndGroupRequest,
    EpisodeRequest,
    AgreeSyncWeightRequest,
)


def answer(model: Model, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``model`` as a JSON answer."""
    return Response(model.model_dump_json(), status, headers, media_type="application/json")


async def read_as_client(request: Request, model: type[OfClientT], limit: int, names: ClientNames) -> OfClientT:
    """The body, as :func:`~swarm.http.asgi.read_model` reads it, of a caller who may act for the client it names.

    Raises:
        ForbiddenError: see :class:`~swarm.server.auth.names.ClientNames`.
    """
    wanted = await read_model(request, model, limit)
    names.check(request.scope["caller"], wanted.client_uuid)
    return wanted
