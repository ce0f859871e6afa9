"""Routes that take and return wire models, as both servers use them, and the OpenAPI document made from them.

Invariant: a route is stated once: its path, method, security, models and summary (its endpoint's docstring) are the
ones that are served, enforced and documented. Plain Starlette routes appear in the document with their path, method
and docstring, and with any JSON object as their body.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import swarm
from swarm.errors import RequestError
from swarm.http.asgi import has_body, read_json

#: OpenAPI's alternatives of what opens a route: scheme -> scopes
Security = Sequence[Mapping[str, Sequence[str]]]

_SCHEMAS = "#/components/schemas/"


class ErrorDetail(BaseModel):
    """What went wrong and what to do about it; an engine's own refusal is passed on with all its fields."""

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
    """A body in the format of OpenAI's or vLLM's API; unknown fields are kept."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class RouteStatement:
    """What the OpenAPI document says of a route beside its path, method and docstring.

    Attributes:
        security: what opens the route; empty: nothing is needed.
        query: the model of the query's parameters.
        body: the model of the body.
        answer: the model of a 200.
        media_types: of a 200 without a model.
        refusals: status, or a class of statuses such as ``"4XX"``, to when it is returned.
        refused: a further model of responses that are not a 200.
        extra: further fields of the operation.
    """

    security: Security = ()
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    media_types: Sequence[str] = ()
    refusals: Mapping[Any, str] = field(default_factory=dict[Any, str])
    refused: type[BaseModel] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def models(self) -> Iterator[tuple[type[BaseModel], JsonSchemaMode]]:
        """All that the route's operation refers to: what is taken, and what is given."""
        for asked in (self.query, self.body):
            if asked is not None:
                yield asked, "validation"
        for answered in (self.answer, self.refused, ErrorResponse):
            if answered is not None:
                yield answered, "serialization"

    def operation(self, route: Route, method: str, schemas: _Schemas) -> dict[str, Any]:
        """The operation of OpenAPI; ``schemas`` has all of :meth:`models`."""
        summary, _, description = inspect.cleandoc(route.endpoint.__doc__ or "").partition("\n\n")
        operation: dict[str, Any] = {
            "operationId": "_".join(re.findall(r"\w+", f"{method.lower()} {route.path_format}")),
            "summary": " ".join(summary.split()).removesuffix("."),
            "description": description,
            "parameters": [
                *(
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                    for name in route.param_convertors
                ),
                *(schemas.parameters(self.query) if self.query is not None else ()),
            ],
            "responses": self._responses(schemas),
            "security": self.security,
        }
        if self.body is not None:
            required = True
            with contextlib.suppress(ValidationError):
                self.body.model_validate({})
                required = False
            operation["requestBody"] = {"required": required, "content": _json(schemas.of(self.body, "validation"))}
        return {name: value for name, value in (operation | dict(self.extra)).items() if value}

    def _responses(self, schemas: _Schemas) -> dict[str, Any]:
        errors = [schemas.of(model, "serialization") for model in (ErrorResponse, self.refused) if model is not None]
        error = _json({"anyOf": errors} if self.refused is not None else errors[0])
        refusals = {"4XX": "the request is refused; `error` says why", **self.refusals}
        responses = {str(status): {"description": when, "content": error} for status, when in refusals.items()}
        # without a schema, generators make clients that throw the answer away
        done: dict[str, Any] = {media_type: {"schema": {}} for media_type in self.media_types}
        if self.answer is not None:
            done = _json(schemas.of(self.answer, "serialization"))
        return {"200": {"description": "done", **({"content": done} if done else {})}, **responses}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


class JsonRoute(Route):
    """A route whose endpoint takes and returns wire models.

    The endpoint takes ``request``, path parameters (strings), ``query`` (a model of the query's parameters; others are
    left out), and a model for the body; a missing body is read as ``{}``. It returns a model or a response.

    Args:
        answer: the model of a 200, where the endpoint's annotation does not name it.
        statement: further fields of :class:`RouteStatement`.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        methods: Sequence[str] = ("GET",),
        answer: type[BaseModel] | None = None,
        **statement: Any,
    ) -> None:
        super().__init__(path, endpoint, methods=methods)
        hints = get_type_hints(endpoint)
        returned = hints.pop("return", None)
        models = {name: hint for name, hint in hints.items() if _is_model(hint)}
        answer = answer or next(filter(_is_model, get_args(returned) or (returned,)), None)
        body = next((model for name, model in models.items() if name != "query"), None)
        self.stated = RouteStatement(query=models.get("query"), body=body, answer=answer, **statement)
        self.app = _app(endpoint, models, takes_request="request" in hints)


def _is_model(hint: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def _app(endpoint: Callable[..., Any], models: Mapping[str, type[BaseModel]], *, takes_request: bool) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        arguments: dict[str, Any] = {**scope["path_params"]}
        if takes_request:
            arguments["request"] = request
        for name, model in models.items():
            if name == "query":
                arguments[name] = _validated(model, _query(request, model), f"{scope['path']}?")
            else:
                data = await read_json(request) if has_body(scope["headers"]) else {}
                arguments[name] = _validated(model, data)
        result = await endpoint(**arguments)
        if not isinstance(result, Response):
            result = Response(result.model_dump_json(), media_type="application/json")
        await result(scope, receive, send)

    return app


def _query(request: Request, model: type[BaseModel]) -> dict[str, Any]:
    """What the query has for ``model``: of a name that stands there several times, a list takes all and others the
    last."""
    parameters = request.query_params
    data: dict[str, Any] = {}
    for name, stated in model.model_fields.items():
        name = stated.alias or name
        if name in parameters:
            many = get_origin(stated.annotation) is list
            data[name] = parameters.getlist(name) if many else parameters[name]
    return data


def _validated(model: type[BaseModel], data: dict[str, Any], where: str = "") -> BaseModel:
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        param = ".".join(str(part) for part in first["loc"])
        # a fault of several fields together names none
        parts = (f"{where}{param}", first["msg"].removeprefix("Value error, "))
        raise RequestError(": ".join(filter(None, parts)), param=param) from exc


class _Schemas:
    """The JSON schemas of models, each once, by how it is used."""

    def __init__(self, models: Iterator[tuple[type[BaseModel], JsonSchemaMode]]) -> None:
        used = list(dict.fromkeys(models))
        self._references, schemas = models_json_schema(used, ref_template=f"{_SCHEMAS}{{model}}")
        self.components: dict[str, Any] = schemas["$defs"]

    def of(self, model: type[BaseModel], mode: JsonSchemaMode) -> dict[str, Any]:
        """The reference to one."""
        return self._references[model, mode]

    def parameters(self, query: type[BaseModel]) -> Iterator[dict[str, Any]]:
        """The parameters of a query."""
        schema = self.components[self.of(query, "validation")["$ref"].removeprefix(_SCHEMAS)]
        for name, stated in schema["properties"].items():
            parameter = {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": stated}
            yield parameter | ({"description": stated["description"]} if "description" in stated else {})


#: What is said of a plain Starlette route: its body and answer are JSON of any shape, or a stream.
_PLAIN_REFUSALS = {"5XX": "the engine or the upstream failed, or serves nothing now"}
ANY_ANSWER = ("application/json", "text/event-stream")
ANY_BODY = {"requestBody": {"required": True, "content": _json({"type": "object"})}}


@dataclass(frozen=True)
class OpenApi:
    """The OpenAPI document of a server.

    Args:
        routes: all of them, the one that serves :meth:`openapi` included; read at the first request.
        schemes: the kinds of secrets, as OpenAPI's security schemes.
        plain_security: what opens a plain Starlette route, by its path.
    """

    title: str
    description: str
    routes: Sequence[BaseRoute]
    schemes: Mapping[str, Mapping[str, str]]
    plain_security: Callable[[str], Security]

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        """The whole document, as JSON data."""
        shown = [
            (route, method, self._statement(route, method))
            for route in self.routes
            if isinstance(route, Route) and route.include_in_schema
            for method in sorted((route.methods or set[str]()) - {"HEAD"})
        ]
        schemas = _Schemas(model for _, _, stated in shown for model in stated.models())
        paths: dict[str, dict[str, Any]] = {}
        for route, method, stated in shown:
            paths.setdefault(route.path_format, {})[method.lower()] = stated.operation(route, method, schemas)
        return {
            "openapi": "3.1.0",
            "info": {"title": self.title, "description": self.description, "version": swarm.__version__},
            "paths": paths,
            "components": {"schemas": schemas.components, "securitySchemes": dict(self.schemes)},
        }

    def _statement(self, route: Route, method: str) -> RouteStatement:
        if isinstance(route, JsonRoute):
            return route.stated
        extra = ANY_BODY if method == "POST" else {}
        security = self.plain_security(route.path_format)
        return RouteStatement(security, media_types=ANY_ANSWER, refusals=_PLAIN_REFUSALS, extra=extra)

    async def openapi(self) -> OpenAIBody:
        """This document."""
        return OpenAIBody.model_validate(self.document)
