"""``GET /openapi.json``: the server's API as an OpenAPI 3.1 document, made from the table of its routes.

Invariant: a body that fits its schema here is read, every answer fits the schema of its status, and a status that a
route may answer is listed.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarm.http.openapi import Operation, Server, document_of
from swarm.server.api.operations import OPERATIONS
from swarm.server.auth.scopes import needed_scope

_DESCRIPTION = """\
Control plane and data plane of a swarm server. Control routes need `Authorization: Bearer TOKEN` (or `x-api-key`) with
a token of the scope that is listed; `admin` includes all, and every token may read. Programs on the server's own
machine need none where the operator allows it. The routes below `/episodes/` and `/groups/` take the key that came with
the claim.

Errors have OpenAI's shape and carry `x-should-retry`, and `retry-after` where a retry helps; every answer carries
`x-request-id`."""

#: What any control route, and any route with a body, may answer.
_COMMON = {
    400: "the request is malformed: `param` names the field",
    401: "no token, an unknown token, or the key of an episode that is over",
    403: "the token lacks the scope, or a page of another site asks",
    413: "the body is larger than the server's limit",
    415: "the body is compressed, or does not say that it is of the right type",
    421: "without a token the server must be addressed by a loopback name",
}


_SCHEMES = {
    "token": {"type": "http", "scheme": "bearer", "description": "a token of the server"},
    "episode": {"type": "http", "scheme": "bearer", "description": "the key of an episode or a group"},
}


def _security(one: Operation) -> list[dict[str, list[str]]]:
    if one.key == "token":
        # the empty alternative: programs on this machine, where the operator allows it
        return [{"token": [needed_scope(one.path)]}, {}]
    return [{"episode": []}] if one.key == "episode" else []


@functools.cache
def document() -> dict[str, Any]:
    """The whole document, as JSON data."""
    server = Server(
        title="swarm server",
        description=_DESCRIPTION,
        schemes=_SCHEMES,
        security=_security,
        common=lambda one: _COMMON if one.key != "none" else {},
    )
    return document_of(server, OPERATIONS)


@functools.cache
def _body() -> bytes:
    return json.dumps(document(), separators=(",", ":")).encode()


class OpenApiRoutes:
    """``/openapi.json``."""

    def routes(self) -> list[Route]:
        return [Route("/openapi.json", self.openapi, methods=["GET"])]

    async def openapi(self, request: Request) -> Response:
        return Response(_body(), media_type="application/json")
