"""``GET /status`` of a server (or another path): its status, or why there is none and what to do about it.

Invariant: every outcome is a value, each within its deadline; nothing that a server sends raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar, cast
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, ValidationError

from adapters.dialects.jsons import object_in
from gateway.tui.format import short
from gateway.tui.targets import Kind, Target
from swarm.http.client import Answer, ConnectionBrokenError, HttpClient
from swarm.status import EngineFailure, ServerStatus

StatusT = TypeVar("StatusT", bound=BaseModel)

#: Steps to request at first.
STEPS = 300
#: Seconds for a response, beyond the time that a long poll waits.
DEADLINE = 10.0
#: Characters of a server's own message that are shown.
_MAX_MESSAGE = 300


class _Part(BaseModel):
    """Part of a gateway's status; fields that a newer gateway adds are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Groups(_Part):
    """Counts of groups; ``informative`` are submitted groups whose rewards differ."""

    trained: int
    dropped: dict[str, int]
    uninformative: int
    informative: int = 0


class Tokens(_Part):
    """Completion tokens of groups: of delivered answers, and of the others."""

    delivered: int = 0
    wasted: int = 0


class Accounted(_Part):
    """What the swarm server counted in the episodes that it took: sums by name, and dropped tokens by why."""

    tokens: dict[str, int] = {}
    why: dict[str, int] = {}


class Counts(_Part):
    """Counts since the gateway's start, of all requests or of a route's."""

    requests: int
    in_flight: int = 0
    groups: Groups
    tokens: Tokens = Tokens()
    accounted: Accounted = Accounted()
    passed_through: dict[str, int] = {}
    hook_failures: dict[str, int] = {}
    fallbacks: dict[str, int] = {}
    errors: dict[str, int] = {}


class Load(_Part):
    """How full a route is; ``refused`` since the start."""

    running: int = 0
    waiting: int = 0
    refused: int = 0


class RouteStatus(Counts):
    """One route; ``breaker`` is the state of its upstream's, ``None`` without an upstream."""

    models: list[str] = []
    policy: str = ""
    load: Load = Load()
    breaker: str | None = None


class SwarmStatus(_Part):
    """One swarm server as the gateway sees it."""

    url: str
    engine: str = ""
    down_since: str | None = None
    policy_version: int | None = None
    background: int = 0
    open_groups: int = 0


class GatewayStatus(Counts):
    """``GET /status`` of a gateway; engine, model and policy version are of the first route with a swarm server."""

    engine: str = ""
    engine_failure: EngineFailure | None = None
    model: str = ""
    policy_version: int | None = None
    background: int = 0
    joined: int = 0
    control: str = "none"
    routes: dict[str, RouteStatus]
    sessions: dict[str, object] = {}
    swarms: list[SwarmStatus] = []


class Reason(StrEnum):
    """Kinds of trouble, in a word for tables."""

    AWAY = "away"
    SILENT = "silent"
    REFUSED = "refused"
    NONSENSE = "nonsense"
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is no status: a kind, and a message that says what to do."""

    reason: Reason
    message: str


class StatusClient(Generic[StatusT]):
    """Asks one server for its status; to be closed.

    Args:
        target: the server.
        model: of its status.
        path: where that is.
    """

    def __init__(self, target: Target, model: type[StatusT], path: str = "/status") -> None:
        self._target = target
        self._model = model
        self._path = path
        self._headers = {"accept": "application/json"}
        if target.secret:
            self._headers["authorization"] = f"Bearer {target.secret}"
        self._http = HttpClient()

    async def get(self, query: Mapping[str, int | float | str] | None = None, wait: float = 0.0) -> StatusT | Trouble:
        """The status, within ``wait`` plus :data:`DEADLINE` seconds."""
        target, limit = self._target, wait + DEADLINE
        url = target.url_of(self._path) + (f"?{urlencode(query)}" if query else "")
        try:
            answer = await self._http.request("GET", url, None, self._headers, limit)
            if answer.status >= 400:
                return _error_status(target, answer)
            if (data := object_in(answer.content)) is None:
                return nonsense(target, "the answer is not a JSON object")
            return self._model.model_validate({name: data[name] for name in self._model.model_fields if name in data})
        except TimeoutError:
            message = f"{target.address} accepts the request and does not answer within {limit:.0f} s"
            return Trouble(Reason.SILENT, f"{message}: is it overloaded or stopped?")
        except ConnectionBrokenError as exc:
            start = "swarm-gateway swarm start" if target.kind is Kind.SWARM else "swarm-gateway serve"
            message = f"no {target.kind} answers at {target.address} ({_clean(str(exc))}): start it (`{start}`)"
            return Trouble(Reason.AWAY, f"{message} or check {target.kind.option}")
        except ValidationError as exc:
            return nonsense(target, f"the answer has {exc.error_count()} wrong fields")
        except Exception as exc:
            # a defect concerns this server alone: the monitor still watches the others
            return nonsense(target, exc)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


def nonsense(target: Target, detail: str | Exception) -> Trouble:
    """A status that cannot be read or shown."""
    text = detail if isinstance(detail, str) else f"{type(detail).__name__}: {detail}"
    message = f"{target.address} is no {target.kind}, or one of another version ({_clean(text)})"
    return Trouble(Reason.NONSENSE, f"{message}: check {target.kind.option}")


def _error_status(target: Target, answer: Answer) -> Trouble:
    status = answer.status
    body = object_in(answer.content) or {}
    error: Any = body.get("error") or body.get("detail")
    told: Any = cast("dict[str, Any]", error).get("message") if isinstance(error, dict) else error
    message = _clean(str(told or answer.content.decode(errors="replace")))
    if status in (401, 403):
        given = "refuses the secret that it was given" if target.secret else "asks for a secret, and none was given"
        return Trouble(Reason.REFUSED, f"{target.address} {given} ({message}): {_HOW_TO_ENTER[target.kind]}")
    if status >= 500 or status == 429:
        return Trouble(Reason.FAILING, f"{target.address} answers with HTTP {status}: {message}; its log says more")
    return nonsense(target, f"HTTP {status}: {message}")


_HOW_TO_ENTER = {
    Kind.SWARM: "give --token or SWARM_TOKEN; "
    "`swarm-gateway swarm tokens create monitor --scope read` in its run folder makes one",
    Kind.GATEWAY: "give --api-key or SWARM_GATEWAY_KEY, a key that is not restricted to routes; "
    "`swarm-gateway keys create monitor` makes one",
}


def _clean(text: str) -> str:
    return short(" ".join(text[: 10 * _MAX_MESSAGE].split()), _MAX_MESSAGE)


async def snapshot(targets: Sequence[Target]) -> tuple[dict[str, Any], list[str]]:
    """One status of every server, within one deadline.

    Returns:
        ``{"swarm_servers": [...], "gateways": [...]}``, each server with ``url``, ``trouble`` (a word), ``error`` (what
        to do) and ``status``; trouble and error, or else the status, are null. And the errors alone.
    """
    found: dict[str, list[dict[str, Any]]] = {"swarm_servers": [], "gateways": []}
    errors: list[str] = []
    for target, answer in zip(targets, await asyncio.gather(*map(_get_once, targets)), strict=True):
        row: dict[str, Any] = {"url": target.address, "trouble": None, "error": None, "status": None}
        if isinstance(answer, Trouble):
            row |= {"trouble": answer.reason.value, "error": answer.message}
            errors.append(answer.message)
        else:
            row["status"] = answer.model_dump(mode="json")
        found["swarm_servers" if target.kind is Kind.SWARM else "gateways"].append(row)
    return found, errors


async def _get_once(target: Target) -> BaseModel | Trouble:
    swarm = target.kind is Kind.SWARM
    client: StatusClient[Any] = StatusClient(target, ServerStatus if swarm else GatewayStatus)
    try:
        return await client.get({"steps": STEPS} if swarm else None)
    finally:
        await client.close()
