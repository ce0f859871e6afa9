"""The dialect endpoints' addresses, for the app to mount; the last one takes whatever is left under ``/v1``."""

from __future__ import annotations

from starlette.routing import Route

from adapters.dialects import ChatDialect, MessagesDialect
from gateway.api.completions import CompletionsEndpoint
from gateway.api.endpoint import Endpoint
from gateway.api.others import CountTokens, Passthrough
from gateway.api.responses import KeptResponse, ResponsesEndpoint

#: Path of what is mounted last.
ANY_OTHER = "/v1/{path:path}"


def dialect_routes() -> list[Route]:
    """One address per dialect, and those that belong to them."""
    endpoints = (
        Endpoint(ChatDialect()),
        CompletionsEndpoint(),
        ResponsesEndpoint(),
        Endpoint(MessagesDialect(), id_header="request-id"),
    )
    return [
        *(Route(endpoint.dialect.path, endpoint, methods=["POST"]) for endpoint in endpoints),
        Route("/v1/messages/count_tokens", CountTokens(), methods=["POST"]),
        Route("/v1/responses/{response_id}", KeptResponse(Passthrough(())), methods=["GET", "DELETE"]),
    ]


def other_routes() -> list[Route]:
    """Whatever else is asked for under ``/v1``; to be mounted last."""
    ours = {*(route.path for route in dialect_routes()), "/v1/models", "/v1/feedback"}
    return [Route(ANY_OTHER, Passthrough(ours), methods=["GET", "POST", "PUT", "PATCH", "DELETE"])]
