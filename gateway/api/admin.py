"""``/admin/code``, ``/admin/config``, ``/admin/policies``, ``/admin/engine``: commands for a route's swarm server.

Invariant: only what is listed here is forwarded, for the key's own routes only, and the swarm server's audit log gets
to know the key by its label. Whoever reaches a gateway without keys may be anybody on this machine, so it does not lend
the token of its route: the caller's own counts.

The swarm server's own paths work below ``/admin`` too, so that ``SwarmClient("http://gateway:8000/admin?route=NAME")``
commands the engine through a gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from urllib.parse import quote, urlencode

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from adapters.dialects.jsons import error_in, object_in
from gateway.api.endpoint import caller_of
from gateway.routing.plan import PlannedRoute
from gateway.runtime import Gateway
from gateway.types import Caller
from swarm.code_snapshots import ArchiveLimits
from swarm.errors import (
    AuthenticationError,
    ForbiddenError,
    NotFoundError,
    RequestError,
    SwarmGatewayError,
    UnavailableError,
    UpstreamError,
)
from swarm.http.asgi import bearer_bytes, read_body
from swarm.http.client import Answer, ConnectionBrokenError, HttpClient
from swarm.subjects import DataReport, Subject
from swarm.types import Notes
from swarm.validation import describe_validation

logger = logging.getLogger(__name__)

#: Deadline of a deletion here, as of the swarm server's.
ERASE_SECONDS = 300.0

#: path below ``/admin`` -> method -> path of the swarm server
_COMMANDS: dict[str, dict[str, str]] = {
    "/code": {"GET": "/code", "POST": "/sync_train_code"},
    "/code/select": {"POST": "/code/select"},
    "/code/{name}": {"GET": "/code/{name}"},
    "/config": {"GET": "/config", "POST": "/sync_train_config"},
    "/config/resolve": {"POST": "/config/resolve"},
    "/config/{name}": {"GET": "/config/{name}"},
    "/policies": {"GET": "/policies"},
    "/policies/explain": {"GET": "/policies/explain"},
    "/policies/kept": {"GET": "/policies/kept"},
    "/policies/kept/{step}": {"GET": "/policies/kept/{step}"},
    "/policies/delete": {"POST": "/policies/delete"},
    "/policies/promote": {"POST": "/policies/promote"},
    "/policies/rollback": {"POST": "/policies/rollback"},
    "/policies/pin": {"POST": "/policies/pin"},
    "/policies/resume": {"POST": "/policies/resume"},
    "/data/report": {"GET": "/data/report"},
    "/data/export": {"GET": "/data/export"},
    "/data/delete": {"POST": "/data/delete"},
    "/engine": {"GET": "/status"},
    "/engine/start": {"POST": "/start_engine"},
    "/engine/stop": {"POST": "/stop_engine"},
}
_OF_DATA = ("/data/report", "/data/delete")
#: paths whose body is code
CODE_PATHS = ("/admin/code", "/admin/sync_train_code")
CODE_BYTES = ArchiveLimits().max_archive_bytes
#: a change may first stop the engine, and a status may wait
_SECONDS = 240.0
_PASSED_ON = ("content-type", "x-should-retry", "retry-after")
_OF_BODY = ("content-type", "content-encoding")


def routes() -> list[BaseRoute]:
    """The routes of all commands."""
    named = [(path, method, target) for path, to in _COMMANDS.items() for method, target in to.items()]
    own = [(target, method, target) for path, method, target in named if path != target]
    own.append(("/get_engine_status", "GET", "/get_engine_status"))
    return [
        Route(f"/admin{path}", forwarding(target), methods=[method], include_in_schema=(path, method, target) in named)
        for path, method, target in (*named, *own)
    ]


def forwarding(target: str) -> Callable[[Request], Awaitable[Response]]:
    """Forwards one command to ``target`` of the swarm server of a route (`?route=`, or the only one)."""

    async def endpoint(request: Request) -> Response:
        gateway: Gateway = request.state.gateway
        caller = caller_of(request.scope)
        if target in _OF_DATA and not any(route.settings.swarm_url for route in gateway.routes.plan.routes):
            return await _told_here(gateway, request, caller, deletes=target == "/data/delete")
        route = _route(gateway, caller, request.query_params.get("route"))
        names = {key: str(value) for key, value in request.path_params.items()}
        if beyond := {".", ".."}.intersection(names.values()):
            raise NotFoundError(f"there is no {beyond.pop()!r}")
        path = target.format(**{key: quote(name, safe="") for key, name in names.items()})
        erased = await _erased(gateway, request, route, caller) if target == "/data/delete" else {}
        answer = erased if isinstance(erased, Answer) else await _sent(request, route, path, caller)
        level = logging.INFO if request.method == "GET" else logging.WARNING
        logger.log(level, "%s of route %s by %s: %d", path, route.name, _name(caller), answer.status)
        headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
        if isinstance(erased, dict) and erased and answer.status == 200:
            return JSONResponse({**(object_in(answer.content) or {}), "gateway": erased}, answer.status, headers)
        return Response(answer.content, answer.status, headers)

    endpoint.__doc__ = f"{target} of the swarm server behind a route (`?route=`, or the only one)."
    return endpoint


async def _told_here(gateway: Gateway, request: Request, caller: Caller, *, deletes: bool) -> Response:
    """The report where no route has a swarm server: what this gateway keeps is all that there is."""
    _subject(request)
    erased = await _erased(gateway, request, None, caller) if deletes else {}
    report = DataReport(deleted=deletes, gateway=erased if isinstance(erased, dict) else {})
    return JSONResponse(report.model_dump(mode="json"))


async def _erased(
    gateway: Gateway, request: Request, route: PlannedRoute | None, caller: Caller
) -> dict[str, int] | Answer:
    """Delete what this gateway has of a subject: first, since the swarm server of ``route``, if there is one, knows the
    ids of its requests.

    Returns how much there was, or the swarm server's refusal to tell these: then nothing is deleted.

    Raises:
        ForbiddenError: the key opens some routes only, and what is kept here is of all.
    """
    if caller.routes is not None:
        raise ForbiddenError(
            "this key is limited to some routes, and a gateway deletes what it keeps of all: use an admin key of all "
            "routes, or ask the swarm server itself (--swarm-url)",
            code="key_limited",
        )
    subject = _subject(request)
    requests = set[str]()
    if route is not None:
        report = await _sent(request, route, "/data/report", caller, method="GET")
        if report.status != 200:
            return report
        requests.update((object_in(report.content) or {}).get("requests", ()))

    def fits(notes: Notes) -> bool:
        return subject.fits(notes) or notes.request_id in requests

    # what is under way writes nothing when it ends
    gateway.telemetry.forget(fits)
    sessions, responses = gateway.sessions.erase(subject), gateway.responses.erase(subject)
    log, watcher = gateway.telemetry.request_log, gateway.sessions.watcher
    try:
        async with asyncio.timeout(ERASE_SECONDS):
            lines = await log.erase(fits) if log else 0
            watched = await watcher.erase(fits) if watcher is not None else {}
    except TimeoutError as exc:
        raise UnavailableError(
            f"what is kept at the gateway is not deleted within {ERASE_SECONDS:g} s: delete it again", code="disk"
        ) from exc
    except OSError as exc:
        raise SwarmGatewayError(
            f"what is kept at the gateway cannot be rewritten: {exc.strerror or exc}", code="disk"
        ) from exc
    return {
        "request_log_lines": lines,
        "sessions": sessions,
        "responses": responses,
        **watched,
    }


def _subject(request: Request) -> Subject:
    """Whose data is meant.

    Raises:
        RequestError: nobody is named, or by a name that is too long.
    """
    try:
        return Subject(**{name: request.query_params.get(name, "") for name in Subject.model_fields})
    except ValidationError as exc:
        raise RequestError(describe_validation(exc, "the query").message) from exc


def _route(gateway: Gateway, caller: Caller, name: str | None) -> PlannedRoute:
    """The route that is meant.

    Raises:
        NotFoundError: there is none of that name for this key.
        RequestError: several are there, and none is named; or it has no swarm server.
    """
    mine = [route for route in gateway.routes.plan.routes if caller.routes is None or route.name in caller.routes]
    if name is not None:
        named = [route for route in mine if route.name == name]
        if not named:
            names = ", ".join(route.name for route in mine)
            raise NotFoundError(f"there is no route {name[:80]!r}; there are: {names}", code="route_not_found")
        if named[0].settings.swarm_url is None:
            raise RequestError(f"the route {name!r} has no swarm server: nothing is trained there", param="route")
        return named[0]
    by_server = {route.settings.swarm_url: route for route in reversed(mine) if route.settings.swarm_url is not None}
    if len(by_server) != 1:
        names = ", ".join(route.name for route in mine if route.settings.swarm_url is not None)
        meant = f"say which route's swarm server is meant (`?route=NAME`); there are: {names}"
        raise RequestError(meant if names else "no route has a swarm server: nothing is trained here", param="route")
    return next(iter(by_server.values()))


async def _sent(request: Request, route: PlannedRoute, path: str, caller: Caller, *, method: str = "") -> Answer:
    """The swarm server's answer.

    Raises:
        AuthenticationError: it does not let a caller without a key command it.
        UnavailableError: it cannot be reached.
        UpstreamError: it does not let this gateway command it.
    """
    url = route.settings.swarm_url or ""
    query = [(name, value) for name, value in request.query_params.multi_items() if name not in ("route", "sender")]
    sender = request.query_params.get("sender", "")
    # the swarm server keeps the first 200 characters
    query.append(("sender", f"{_name(caller)} for {sender}" if sender else _name(caller)))
    own = bearer_bytes(request.scope["headers"]).decode("latin-1")
    token = route.settings.swarm_token.get_secret_value() if caller.key_id else own
    headers = {"authorization": f"Bearer {token}"} if token else {}
    body: bytes | None = None
    method = method or request.method
    if method == "POST":
        body = bytes(await read_body(request.receive)) or None
        if body is not None:
            about = {name: request.headers[name] for name in _OF_BODY if name in request.headers}
            headers |= {"content-type": "application/json", **about}
    http = HttpClient()
    try:
        answer = await http.request(method, f"{url.rstrip('/')}{path}?{urlencode(query)}", body, headers, _SECONDS)
    except (ConnectionBrokenError, TimeoutError) as exc:
        raise UnavailableError(
            f"no swarm server answers for route {route.name}: {exc}", code="server_unreachable"
        ) from exc
    finally:
        await http.close()
    if answer.status == 401 or (answer.status == 403 and error_in(answer.content).get("code") == "scope_missing"):
        if not caller.key_id:
            raise AuthenticationError(
                "this gateway asks for no key, so it lends nobody its own token: send a token of the swarm server that "
                "has the scope admin, or give the gateway keys (`swarm-gateway keys create NAME --admin`)",
                code="admin_token_required",
            )
        raise UpstreamError(
            f"the swarm server does not let this gateway command it: the swarm_token of route {route.name} needs the "
            "scope admin",
            code="gateway_is_no_admin",
        )
    return answer


def _name(caller: Caller) -> str:
    return f"gateway key {caller.label or caller.key_id}" if caller.key_id else "a gateway without keys"
