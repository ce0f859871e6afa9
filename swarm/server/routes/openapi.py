"""``GET /openapi.json``: the server's API as an OpenAPI 3.1 document, made from the table of its routes.

Invariant: a body that fits its schema here is read, every answer fits the schema of its status, and a status that a
route may answer is listed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
from typing import Any

from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarm.server.auth.scopes import needed_scope
from swarm.server.routes.operations import OPERATIONS, ErrorResponse, Operation

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
    415: "the body does not say that it is of the right type",
    421: "without a token the server must be addressed by a loopback name",
}


@functools.cache
def document() -> dict[str, Any]:
    """The whole document, as JSON data."""
    used: set[tuple[Any, JsonSchemaMode]] = {(ErrorResponse, "serialization")}
    for one in OPERATIONS:
        used |= {(model, "serialization") for model in (one.answer, one.refused) if model is not None}
        if one.request is not None:
            used.add((one.request, "validation"))
    ordered = sorted(used, key=lambda item: (item[0].__name__, item[1]))
    references, definitions = models_json_schema(ordered, ref_template="#/components/schemas/{model}")
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "swarm server", "version": _version(), "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "a token of the server"},
                "episode": {"type": "http", "scheme": "bearer", "description": "the key of an episode or a group"},
            },
        },
    }


def _operation(one: Operation, references: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"[a-z]+", f"{one.method.lower()} {one.path}")),
        "summary": one.summary,
        "responses": _responses(one, references),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", one.path)
    ] + [
        {"name": query.name, "in": "query", "description": query.description, "schema": query.schema}
        for query in one.query
    ]
    if parameters:
        described["parameters"] = parameters
    if one.request is not None:
        content: dict[str, Any] = {"application/json": {"schema": references[one.request, "validation"]}}
        described["requestBody"] = {"required": True, "content": content}
    elif one.upload is not None:
        content = {one.upload: {"schema": {"type": "string", "format": "binary"}}}
        described["requestBody"] = {"required": True, "content": content}
    if one.key == "token":
        # the empty alternative: programs on this machine, where the operator allows it
        described["security"] = [{"token": [needed_scope(one.path)]}, {}]
    elif one.key == "episode":
        described["security"] = [{"episode": []}]
    return described


def _responses(one: Operation, references: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    error = references[ErrorResponse, "serialization"]
    refused = {"anyOf": [error, references[one.refused, "serialization"]]} if one.refused is not None else error
    statuses = dict(_COMMON) if one.key != "none" else {}
    for status, when in one.refusals:
        statuses[status] = when
    found: dict[str, Any] = {"200": {"description": "done", "content": _content(one, references)}}
    for status, when in sorted(statuses.items()):
        found[str(status)] = {"description": when, "content": {"application/json": {"schema": refused}}}
    return found


def _content(one: Operation, references: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    schema = references[one.answer, "serialization"] if one.answer is not None else {"type": "string"}
    content: dict[str, Any] = {one.media_type: {"schema": schema}}
    if one.stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content


def _version() -> str:
    try:
        return importlib.metadata.version("swarm-gateway")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "0"


@functools.cache
def _body() -> bytes:
    return json.dumps(document(), separators=(",", ":")).encode()


class OpenApiRoutes:
    """``/openapi.json``."""

    def routes(self) -> list[Route]:
        return [Route("/openapi.json", self.openapi, methods=["GET"])]

    async def openapi(self, request: Request) -> Response:
        return Response(_body(), media_type="application/json")
