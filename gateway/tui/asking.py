"""One question to one server: its status, or in words why there is none and what to do about it.

Invariant: every outcome is a value, each within its deadline; nothing that a server sends raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar
from urllib.parse import urlencode

from pydantic import BaseModel

from gateway.cli.status import printable
from gateway.tui.targets import Kind, Target
from swarm.client import wire
from swarm.client.policy import Outcome
from swarm.errors import SwarmGatewayError
from swarm.http.client import Answer, ConnectionBrokenError, HttpClient

StatusT = TypeVar("StatusT", bound=BaseModel)

#: Seconds that an answer may take beyond those that the server was asked to wait.
DEADLINE = 10.0
#: Characters of a server's own words that are shown.
_MOST_WORDS = 300


class Why(StrEnum):
    """Kinds of trouble, in a word for tables."""

    AWAY = "away"
    SLOW = "silent"
    REFUSED = "refused"
    NONSENSE = "nonsense"
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a server tells nothing; ``words`` say what it is and what to do."""

    why: Why
    words: str


class Asker(Generic[StatusT]):
    """Asks one server again and again; to be closed.

    Args:
        target: whom.
        model: what its status is read as.
        http: closed with this.
    """

    def __init__(self, target: Target, model: type[StatusT], http: HttpClient | None = None) -> None:
        self._target = target
        self._model = model
        self._http = http or HttpClient()

    async def ask(self, query: Mapping[str, str | int | float] | None = None, wait: float = 0.0) -> StatusT | Trouble:
        """The status, at the latest ``wait`` and :data:`DEADLINE` seconds from now."""
        try:
            return await self._ask(query, wait)
        except Exception as exc:
            # nobody foresaw it, and it is this server's alone: the others are still to be watched
            return unexpected(self._target, exc)

    async def _ask(self, query: Mapping[str, str | int | float] | None, wait: float) -> StatusT | Trouble:
        call = wire.Call("GET", "/status", self._model)
        seconds = wait + DEADLINE
        url = self._target.status_url + (f"?{urlencode(query)}" if query else "")
        outcome = await self._send(url, seconds)
        if not isinstance(outcome, Answer) or outcome.status >= 400:
            return trouble_of(self._target, outcome, seconds)
        try:
            return wire.read_answer(call, outcome)
        except SwarmGatewayError as exc:
            return _nonsense(self._target, exc.message)

    async def _send(self, url: str, seconds: float) -> Outcome:
        try:
            async with asyncio.timeout(seconds):
                return await self._http.request("GET", url, None, _headers(self._target))
        except (ConnectionBrokenError, TimeoutError) as exc:
            return exc

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


def _headers(target: Target) -> dict[str, str]:
    return {"accept": "application/json"} | ({"authorization": f"Bearer {target.secret}"} if target.secret else {})


def unexpected(target: Target, error: Exception) -> Trouble:
    """What a status, or the way to it, raised that nobody foresaw: it cannot be read or shown."""
    return _nonsense(target, f"{type(error).__name__}: {error}")


def trouble_of(target: Target, outcome: Outcome, waited: float) -> Trouble:
    """What an outcome that is no answer means, and what to do."""
    if isinstance(outcome, TimeoutError):
        silent = f"{target.address} takes the question and does not answer within {waited:.0f} s"
        return Trouble(Why.SLOW, f"{silent}: is it overloaded or stopped?")
    if isinstance(outcome, ConnectionBrokenError):
        return Trouble(Why.AWAY, _away(target, outcome))
    said = wire.error_of(wire.Call("GET", "/status", BaseModel), outcome).message.removeprefix("/status: ")
    said = printable(" ".join(said.removesuffix(_CLIENTS_ADVICE).split()))[:_MOST_WORDS]
    if outcome.status in (401, 403):
        return Trouble(Why.REFUSED, _refused(target, said))
    if outcome.status in (429, 502, 503, 504) or outcome.status >= 500:
        return Trouble(Why.FAILING, f"{target.address} answers with HTTP {outcome.status}: {said}; its log says more")
    return _nonsense(target, f"HTTP {outcome.status}: {said}")


#: what the Python client's error says to its users, who pass the token otherwise
_CLIENTS_ADVICE = "; pass the server's token (token=... or SWARM_TOKEN)"


def _away(target: Target, error: ConnectionBrokenError) -> str:
    why = printable(str(error) or type(error).__name__)[:_MOST_WORDS]
    start = "swarm-gateway swarm start" if target.kind is Kind.SWARM else "swarm-gateway serve"
    return f"no {target.kind} answers at {target.address} ({why}): start it (`{start}`) or check {target.kind.option}"


def _refused(target: Target, said: str) -> str:
    given = "refuses what it was given" if target.secret else "asks for a secret, and none was given"
    if target.kind is Kind.SWARM:
        how = (
            "give --token or SWARM_TOKEN; `swarm-gateway swarm tokens create monitor --scope read` in its run folder "
            "makes one"
        )
    else:
        how = (
            "give --api-key or OPENAI_API_KEY, a key that is not for some routes only; "
            "`swarm-gateway keys create monitor` makes one"
        )
    return f"{target.address} {given} ({said}): {how}"


def _nonsense(target: Target, said: str) -> Trouble:
    said = printable(said.removeprefix("/status: ").removesuffix("; is that a swarm server?"))[:_MOST_WORDS]
    what = f"what answers at {target.address} is no {target.kind}, or one of another version ({said})"
    return Trouble(Why.NONSENSE, f"{what}: check {target.kind.option}")
