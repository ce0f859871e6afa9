"""``GET /v1/models`` and ``GET /v1/models/{name}``: what the caller may ask for."""

from __future__ import annotations

from starlette.requests import Request

from gateway.api.endpoint import caller_of
from gateway.runtime import Gateway
from swarm.cards import model_list
from swarm.http.routes import OpenAIBody


async def list_models(request: Request) -> OpenAIBody:
    """The models that the key may ask for."""
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        return OpenAIBody.model_validate(model_list(await table.models(caller_of(request.scope))))


async def get_model(request: Request, name: str) -> OpenAIBody:
    """One model."""
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        return OpenAIBody.model_validate(await table.model(name, caller_of(request.scope)))
