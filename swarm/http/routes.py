"""FastAPI routes as both servers use them, and the OpenAPI document made from them.

Invariant: a route is stated once: its path, method, security, models and summary (its endpoint's docstring) are the
ones that are served, enforced and documented. Plain Starlette routes appear in the document with their path, method
and docstring, and with any JSON object as their body.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, get_type_hints

from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import swarm
from swarm.errors import RequestError
from swarm.http.asgi import has_body, read_json

#: OpenAPI's alternatives of what opens a route: scheme -> scopes
Security = Sequence[Mapping[str, Sequence[str]]]


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


class JsonRoute(Route):
    """A route whose endpoint takes and returns wire models.

    The endpoint takes ``request``, path parameters (strings), and a model for the body; a missing body is read as
    ``{}``. It is called directly, in a quarter of the time of FastAPI's handler, and its route is built for the OpenAPI
    document only. Only endpoints with other parameters (queries) go through FastAPI's handler, which is built at the
    first request; they have no body.

    Args:
        security: what opens the route, as OpenAPI states it; empty: nothing is needed.
        refusals: status, or a class of statuses such as ``"4XX"``, to when it is returned.
        refused: a further model of responses that are not a 200.
        extra: further fields of the OpenAPI operation.
        options: as for :class:`fastapi.routing.APIRoute`; ``methods`` is ``GET`` by default.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        security: Security = (),
        refusals: Mapping[Any, str] | None = None,
        refused: type[BaseModel] | None = None,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        model: Any = ErrorResponse if refused is None else ErrorResponse | refused
        stated = {"4XX": "the request is refused; `error` says why", **(refusals or {})}
        summary, _, self._description = inspect.cleandoc(endpoint.__doc__ or "").partition("\n\n")
        self._build = functools.partial(
            APIRoute,
            path,
            endpoint,
            summary=" ".join(summary.split()).removesuffix("."),
            responses={status: {"description": when, "model": model} for status, when in stated.items()},
            openapi_extra={**({"security": security} if security else {}), **(extra or {})},
            **options,
        )
        super().__init__(path, endpoint, methods=options.get("methods"))
        self.app = _direct_app(endpoint, self.param_convertors.keys()) or self._stated_app

    @functools.cached_property
    def stated(self) -> APIRoute:
        """The route as FastAPI states it in an OpenAPI document."""
        route = self._build()
        route.description = self._description
        return route

    async def _stated_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        # FastAPI's handler wants this around it
        await AsyncExitStackMiddleware(self.stated.app)(scope, receive, send)


def _direct_app(endpoint: Callable[..., Awaitable[Any]], path_parameters: Set[str]) -> ASGIApp | None:
    """What answers a request by calling ``endpoint``; ``None`` if it has parameters that only FastAPI can fill."""
    hints = {name: hint for name, hint in get_type_hints(endpoint, include_extras=True).items() if name != "return"}
    models = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, BaseModel)}
    if hints.keys() - models.keys() - path_parameters - {"request"}:
        return None

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        arguments: dict[str, Any] = {**scope["path_params"]}
        if "request" in hints:
            arguments["request"] = request
        for name, model in models.items():
            data = await read_json(request) if has_body(scope["headers"]) else {}
            arguments[name] = _validated(model, data)
        result = await endpoint(**arguments)
        if not isinstance(result, Response):
            result = Response(result.model_dump_json(), media_type="application/json")
        await result(scope, receive, send)

    return app


def _validated(model: type[BaseModel], data: dict[str, Any]) -> BaseModel:
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        param = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{param}: {first['msg']}", param=param) from exc


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
        stated = [route for route in self.routes if isinstance(route, Route) and route.include_in_schema]
        shown = [route.stated for route in stated if isinstance(route, JsonRoute)]
        whole = get_openapi(title=self.title, version=swarm.__version__, description=self.description, routes=shown)
        for route in stated:
            if not isinstance(route, JsonRoute):
                for method in sorted((route.methods or set[str]()) - {"HEAD"}):
                    operation = _plain_operation(route, method, self.plain_security(route.path_format))
                    whole["paths"].setdefault(route.path_format, {})[method.lower()] = operation
        whole["components"]["securitySchemes"] = dict(self.schemes)
        return whole

    async def openapi(self) -> OpenAIBody:
        """This document."""
        return OpenAIBody.model_validate(self.document)


def _plain_operation(route: Route, method: str, security: Security) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    summary = inspect.cleandoc(route.endpoint.__doc__ or "").partition("\n\n")[0]
    operation: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"\w+", f"{method.lower()} {route.path_format}")),
        "summary": " ".join(summary.split()).removesuffix("."),
        "responses": {
            "200": {"description": "done", "content": {"application/json": {}, "text/event-stream": {}}},
            "4XX": {"description": "the request is refused", "content": error},
            "5XX": {"description": "the engine or the upstream failed, or serves nothing now", "content": error},
        },
    }
    if names := list(route.param_convertors):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if method == "POST":
        content = {"application/json": {"schema": {"type": "object"}}}
        operation["requestBody"] = {"required": True, "content": content}
    if security:
        operation["security"] = security
    return operation
