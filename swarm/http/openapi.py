"""An OpenAPI 3.1 document made from a table of routes.

Invariant: what the table says of a route, the document says: its models, its statuses and what opens it.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import JsonSchemaMode, models_json_schema

Method = Literal["GET", "POST", "DELETE"]


class ErrorDetail(BaseModel):
    """What went wrong and what to do about it; an engine's own refusal is passed on with whatever it says."""

    model_config = ConfigDict(extra="allow")

    message: str = ""
    type: str = ""
    param: str | None = None
    code: str | int | None = Field(default=None, description="a word for programs")


class ErrorResponse(BaseModel):
    """Every error, in OpenAI's shape."""

    model_config = ConfigDict(extra="allow")

    error: ErrorDetail


class OpenAIBody(BaseModel):
    """A body as OpenAI's and vLLM's API have it; unknown fields are forwarded."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True, slots=True)
class Query:
    """One parameter of a query or a header; ``schema`` is JSON Schema."""

    name: str
    description: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """One route.

    Args:
        answer: the model of the 200; ``None``: see ``media_type``.
        refusals: statuses beside those that every route of its kind may answer, and when.
        refused: a further model of what is no 200.
        media_type: of the 200 where that is not JSON.
        stream: the 200 may be server-sent events.
        upload: media type of a body that is not JSON.
        key: the kind of secret that opens it, as its server names it.
        headers: that it heeds.
        optional: the body may be left out.
    """

    method: Method
    path: str
    summary: str
    request: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    query: tuple[Query, ...] = ()
    refusals: tuple[tuple[int, str], ...] = ()
    refused: type[BaseModel] | None = None
    media_type: str = "application/json"
    stream: bool = False
    upload: str | None = None
    key: str = "token"
    headers: tuple[Query, ...] = ()
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Server:
    """Whose routes they are.

    Attributes:
        schemes: the secrets that there are, as OpenAPI's security schemes.
        security: what opens a route; empty: nothing is needed.
        common: statuses that a route of its kind may answer, and when.
    """

    title: str
    description: str
    schemes: Mapping[str, dict[str, str]]
    security: Callable[[Operation], list[dict[str, list[str]]]]
    common: Callable[[Operation], Mapping[int, str]]


def document_of(server: Server, operations: Sequence[Operation]) -> dict[str, Any]:
    """The whole document, as JSON data."""
    used: set[tuple[Any, JsonSchemaMode]] = {(ErrorResponse, "serialization")}
    for one in operations:
        used |= {(model, "serialization") for model in (one.answer, one.refused) if model is not None}
        if one.request is not None:
            used.add((one.request, "validation"))
    ordered = sorted(used, key=lambda item: (item[0].__name__, item[1]))
    references, definitions = models_json_schema(ordered, ref_template="#/components/schemas/{model}")
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(server, one, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": server.title, "version": _version(), "description": server.description},
        "paths": paths,
        "components": {"schemas": definitions["$defs"], "securitySchemes": dict(server.schemes)},
    }


def _operation(server: Server, one: Operation, references: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"[a-z]+", f"{one.method.lower()} {one.path}")),
        "summary": one.summary,
        "responses": _responses(server, one, references),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", one.path)
    ] + [
        {"name": given.name, "in": place, "description": given.description, "schema": given.schema}
        for place, some in (("query", one.query), ("header", one.headers))
        for given in some
    ]
    if parameters:
        described["parameters"] = parameters
    if one.request is not None:
        content: dict[str, Any] = {"application/json": {"schema": references[one.request, "validation"]}}
        described["requestBody"] = {"required": not one.optional, "content": content}
    elif one.upload is not None:
        content = {one.upload: {"schema": {"type": "string", "format": "binary"}}}
        described["requestBody"] = {"required": True, "content": content}
    if security := server.security(one):
        described["security"] = security
    return described


def _responses(server: Server, one: Operation, references: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    error = references[ErrorResponse, "serialization"]
    refused = {"anyOf": [error, references[one.refused, "serialization"]]} if one.refused is not None else error
    statuses = {**server.common(one), **dict(one.refusals)}
    found: dict[str, Any] = {"200": {"description": "done", "content": _content(one, references)}}
    for status, when in sorted(statuses.items()):
        found[str(status)] = {"description": when, "content": {"application/json": {"schema": refused}}}
    return found


def _content(one: Operation, references: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    schema = references[one.answer, "serialization"] if one.answer is not None else {"type": "string"}
    content: dict[str, Any] = {one.media_type: {"schema": schema}}
    if one.stream:
        # OpenAPI 3.1 has no word for the schema of an event
        content["text/event-stream"] = {}
    return content


def _version() -> str:
    try:
        return importlib.metadata.version("swarm-gateway")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "0"
