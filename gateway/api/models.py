"""``GET /v1/models`` and ``GET /v1/models/{name}``: what the caller may ask for."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.runtime import Gateway
from gateway.types import Caller
from swarm.cards import model_list


async def list_models(request: Request) -> Response:
    """The names that lead to a route."""
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        return JSONResponse(model_list(await table.models(_caller(request))))


async def get_model(request: Request) -> Response:
    """One of them."""
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        return JSONResponse(await table.model(request.path_params["name"], _caller(request)))


def _caller(request: Request) -> Caller:
    return getattr(request.state, "caller", None) or Caller()
