"""``GET /openapi.json``: the gateway's API as an OpenAPI 3.1 document, made from the table of its routes.

Invariant: every answer of a route fits the schema of its status, and a status that a route may answer is listed.
"""

from __future__ import annotations

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.api.operations import OPERATIONS
from swarm.http.openapi import Operation, Server, document_of

_DESCRIPTION = """\
Answers like vLLM, in the dialect of the address. Whatever else is asked for under `/v1` goes on to the upstream of the
route, if it has one. A gateway that has keys needs one: `Authorization: Bearer KEY` or `x-api-key`.

Errors have OpenAI's shape, below `/v1/messages` Anthropic's, and carry `x-should-retry`, and `retry-after` where a
retry helps; every answer carries `x-request-id`."""

_COMMON = {
    400: "the request is malformed: `param` names the field",
    401: "no key, an unknown key, or one that has expired",
    403: "the key does not open this, or a page of another site asks",
    421: "without a key the gateway must be addressed by a loopback name",
    429: "the key's rate is used up",
}


@functools.cache
def document() -> dict[str, Any]:
    """The whole document, as JSON data."""
    server = Server(
        title="swarm-gateway",
        description=_DESCRIPTION,
        schemes={"key": {"type": "http", "scheme": "bearer", "description": "a key of the gateway"}},
        security=_security,
        common=lambda one: _COMMON if one.key != "none" else {},
    )
    return document_of(server, OPERATIONS)


def _security(one: Operation) -> list[dict[str, list[str]]]:
    # the empty alternative: a gateway without keys
    return [{"key": []}, {}] if one.key == "key" else []


async def openapi(request: Request) -> Response:
    """The document."""
    return JSONResponse(document())
