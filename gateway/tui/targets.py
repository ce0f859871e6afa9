"""The servers that the monitor watches, and one request to one of them: its status, or why there is none and what to do
about it.

Invariant: every outcome is a value, each within its deadline; nothing that a server sends raises.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar, cast
from urllib.parse import urlencode, urlsplit

from pydantic import BaseModel, ValidationError

from adapters.dialects.jsons import object_in
from gateway.observability.scrubbing import without_credentials
from gateway.stats import GatewayStatus
from gateway.views.format import short
from swarm.client.wire import validate_known
from swarm.errors import ConfigError
from swarm.http.client import Answer, ConnectionBrokenError, HttpClient
from swarm.status import ServerStatus

ModelT = TypeVar("ModelT", bound=BaseModel)

#: Steps to request at first.
STEPS = 300
#: Seconds for a response, beyond the time that a long poll waits.
DEADLINE = 10.0
#: Characters of a server's own message that are shown.
_MAX_MESSAGE = 300


class Kind(StrEnum):
    """The kind of a server."""

    SWARM = "swarm server"
    GATEWAY = "gateway"

    @property
    def option(self) -> str:
        """The option with its address."""
        return "--swarm-url" if self is Kind.SWARM else "--gateway-url"

    @property
    def default_url(self) -> str:
        """Where ``swarm-gateway up`` runs it."""
        return "http://127.0.0.1:10086" if self is Kind.SWARM else "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Target:
    """One server; ``secret`` is a swarm server's token or a gateway's key, or empty."""

    kind: Kind
    url: str = field(repr=False)
    secret: str = field(default="", repr=False)

    def url_of(self, path: str) -> str:
        """``path`` below the address."""
        # a user and a password in the address and a secret would be two credentials
        return f"{self.address if self.secret else self.url}{path}"

    @property
    def address(self) -> str:
        """``http://host:port/prefix`` for display: without user and password."""
        return without_credentials(self.url)

    @property
    def name(self) -> str:
        """``host:port/prefix``."""
        return self.address.partition("://")[2]


def make_targets(
    swarm_urls: Sequence[str], token: str | None, gateway_urls: Sequence[str], api_key: str | None
) -> list[Target]:
    """The servers of the options, each once; one secret is for all servers of its kind, but that of the environment
    gives way to one in an address.

    Raises:
        ConfigError: an invalid address, or a secret with characters that no header allows.
    """
    targets = [
        *_of_kind(Kind.SWARM, swarm_urls, token, "--token", "SWARM_TOKEN"),
        *_of_kind(Kind.GATEWAY, gateway_urls, api_key, "--api-key", "SWARM_GATEWAY_KEY"),
    ]
    return list({(target.kind, target.address): target for target in targets}.values())


def _of_kind(kind: Kind, urls: Sequence[str], secret: str | None, option: str, variable: str) -> list[Target]:
    gives_way = secret == os.environ.get(variable)
    secret = (secret or "").strip()
    if not (secret.isascii() and secret.isprintable()):
        raise ConfigError(f"{option} (or {variable}) has characters that no secret of a {kind} has")
    parsed = [_parse_url(kind, url) for url in urls]
    return [Target(kind, url, "" if gives_way and urlsplit(url).password else secret) for url in parsed]


def _parse_url(kind: Kind, text: str) -> str:
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        if url.scheme not in ("http", "https") or not url.hostname or url.port == 0:
            raise ValueError
    except ValueError:
        raise ConfigError(f"{kind.option} {text!r} is no http address; write it like {kind.default_url}") from None
    return url._replace(path=url.path.rstrip("/"), query="", fragment="").geturl()


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


class StatusClient:
    """Asks one server for its status; to be closed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._headers = {"accept": "application/json"}
        if target.secret:
            self._headers["authorization"] = f"Bearer {target.secret}"
        self._http = HttpClient()

    async def get(
        self, model: type[ModelT], query: Mapping[str, int | float] | None = None, wait: float = 0.0
    ) -> ModelT | Trouble:
        """The status, within ``wait`` plus :data:`DEADLINE` seconds."""
        target, limit = self._target, wait + DEADLINE
        url = target.url_of("/status") + (f"?{urlencode(query)}" if query else "")
        try:
            answer = await self._http.request("GET", url, None, self._headers, limit)
            if answer.status >= 400:
                return _error_status(target, answer)
            if (data := object_in(answer.content)) is None:
                return nonsense(target, "the answer is not a JSON object")
            return validate_known(model, data)
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
    detail: Any = cast("dict[str, Any]", error).get("message") if isinstance(error, dict) else error
    message = _clean(str(detail or answer.content.decode(errors="replace")))
    if status in (401, 403):
        refusal = "refuses the secret that it was given" if target.secret else "asks for a secret, and none was given"
        return Trouble(Reason.REFUSED, f"{target.address} {refusal} ({message}): {_HOW_TO_ENTER[target.kind]}")
    if status >= 500 or status == 429:
        return Trouble(Reason.FAILING, f"{target.address} answers with HTTP {status}: {message}; its log says more")
    return nonsense(target, f"HTTP {status}: {message}")


_HOW_TO_ENTER = {
    Kind.SWARM: "give --token or SWARM_TOKEN; "
    "`swarm-gateway swarm tokens create monitor --scope read --run-dir FOLDER` makes one, with its run folder",
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
    rows: dict[str, list[dict[str, Any]]] = {"swarm_servers": [], "gateways": []}
    errors: list[str] = []
    for target, answer in zip(targets, await asyncio.gather(*map(_get_once, targets)), strict=True):
        row: dict[str, Any] = {"url": target.address, "trouble": None, "error": None, "status": None}
        if isinstance(answer, Trouble):
            row |= {"trouble": answer.reason.value, "error": answer.message}
            errors.append(answer.message)
        else:
            row["status"] = answer.model_dump(mode="json")
        rows["swarm_servers" if target.kind is Kind.SWARM else "gateways"].append(row)
    return rows, errors


async def _get_once(target: Target) -> BaseModel | Trouble:
    client = StatusClient(target)
    try:
        if target.kind is Kind.SWARM:
            return await client.get(ServerStatus, {"steps": STEPS})
        return await client.get(GatewayStatus)
    finally:
        await client.close()
