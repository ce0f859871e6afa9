"""The HTTP client of the judges of one endpoint: concurrency, retries, budget and cache in one place.

Invariant: a call ends with a parsed answer or a ``HookError`` with the reason, is tried a bounded number of times, and
never exceeds the endpoint's caps. At most ``max_concurrency`` calls of an event loop are in flight over all groups, on
shared connections.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

from reward_hooks.judges.endpoint import Endpoint, budget_of
from reward_hooks.spending import Spending
from swarm.concurrency import Latest, backoff
from swarm.errors import HookError
from swarm.http.client import ConnectionBrokenError, HttpClient, has_proxy, retry_after
from swarm.validation import environment_key

T = TypeVar("T")

#: Statuses after which the request may be repeated.
_NOT_NOW = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_NEW_LIMIT = "max_completion_tokens"
#: Optional fields that a server may refuse, by a word of its error message.
_OPTIONAL = {
    "logprob": {"logprobs", "top_logprobs"},
    "response_format": {"response_format"},
    "json_schema": {"response_format"},
    "temperature": {"temperature"},
    # it names what takes the place of the refused one
    _NEW_LIMIT: {"max_tokens"},
}
#: Bytes that the chat template adds to a prompt.
_TEMPLATE_BYTES = 512


class Unparsable(ValueError):
    """A judge's answer holds no verdict; parsers raise it, and it is reported as ``judge_unparsable``."""


class _Again(Exception):
    """A try that may be repeated, after at least ``pause`` seconds."""

    def __init__(self, why: str, pause: float = 0.0) -> None:
        super().__init__(why)
        self.pause = pause


@dataclass(frozen=True)
class _Connections:
    """The connections of one event loop, and the permits of the calls that it makes at once."""

    http: HttpClient
    permits: asyncio.Semaphore
    opened: AsyncGenerator[None]


class JudgeClient:
    """Calls one endpoint; safe for concurrent use. Judges with the same client share its limits, budget and cache.

    Its connections belong to one event loop and close when that loop ends; in another loop it opens others, also while
    the first one runs, as for hooks that call ``asyncio.run``: ``max_concurrency`` is then of each loop.

    Raises:
        ConfigError: the key's environment variable is not set.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._headers = {"content-type": "application/json"}
        if key := environment_key(endpoint.api_key_env, f"the judge at {endpoint.base_url}"):
            self._headers["authorization"] = f"Bearer {key}"
        self._budget = budget_of(endpoint)
        self._cache = Latest[str, Any](endpoint.cache_entries)
        self._refused: set[str] = set()
        self._by_loop: dict[asyncio.AbstractEventLoop, _Connections] = {}

    @property
    def spent(self) -> Spending:
        """What this client has spent so far; with caps, all clients with its settings together."""
        return self._budget.spent

    async def chat(self, body: dict[str, Any], parse: Callable[[dict[str, Any]], T], *, kind: str) -> T:
        """``POST {base_url}/chat/completions``; ``parse`` gets the first choice.

        Once the server refuses optional fields (log-probabilities, a response format, a temperature), they are not sent
        any more; ``max_tokens`` is sent by its newer name.

        Raises:
            HookError: see :meth:`post`.
        """
        url = f"{self.endpoint.base_url.rstrip('/')}/chat/completions"
        more = self.endpoint.extra_body
        limits = [part.get(name) for part in (body, more) for name in ("max_tokens", "max_completion_tokens")]
        most = max(int(limit or 0) for limit in limits) * int(more.get("n") or 1)
        return await self.post(url, body, lambda answer: parse(_choice(answer)), kind=kind, output_tokens=most)

    async def post(
        self, url: str, body: dict[str, Any], parse: Callable[[Any], T], *, kind: str, output_tokens: int = 0
    ) -> T:
        """The parsed answer to one JSON request, or the cached result of an equal request.

        Args:
            url: where to.
            body: the request, to which the endpoint's ``model`` and ``extra_body`` are added.
            parse: makes the result of the answer's JSON; raises :class:`Unparsable` if it cannot.
            kind: names the parser; it is part of the cache key.
            output_tokens: the most tokens that the answer can have, for the budget.

        Raises:
            HookError: ``judge_budget``, ``judge_unavailable`` (no answer after all tries), ``judge_refused`` (an error
                that a retry cannot cure) or ``judge_unparsable``.
        """
        model = {"model": self.endpoint.model} if self.endpoint.model else {}
        body = {**model, **body, **self.endpoint.extra_body}
        key = hashlib.sha256(json.dumps([kind, url, body], sort_keys=True).encode()).hexdigest()
        if key in self._cache:
            self._cache.move_to_end(key)
            self._budget.count("cache_hits")
            return cast(T, self._cache[key])
        try:
            answer = await self._answer(url, body, output_tokens)
            try:
                result = parse(answer)
            except Unparsable as exc:
                self._fail("judge_unparsable", f"gave an answer that cannot be read: {exc}", exc)
            except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as exc:
                self._fail("judge_unparsable", f"gave an answer of another shape ({type(exc).__name__}: {exc})", exc)
        except HookError:
            self._budget.count("failures")
            raise
        self._cache[key] = result
        return result

    async def _answer(self, url: str, body: dict[str, Any], output_tokens: int) -> Any:
        failures = 0
        while True:
            try:
                return await self._once(url, body, output_tokens)
            except _Again as exc:
                failures += 1
                if failures >= self.endpoint.attempts:
                    self._fail("judge_unavailable", f"{exc} (tries: {failures})", exc)
                if exc.pause > self.endpoint.retry_cap_seconds:
                    self._fail("judge_unavailable", f"{exc}, and asks to wait {exc.pause:g} s", exc)
                endpoint = self.endpoint
                pause = max(backoff(failures, endpoint.retry_base_seconds, endpoint.retry_cap_seconds), exc.pause)
            await asyncio.sleep(pause)
            self._budget.count("retries")

    async def _once(self, url: str, body: dict[str, Any], output_tokens: int) -> Any:
        """One try, and another one at once for each set of optional fields that the server refuses: the answer's JSON.

        Raises:
            _Again: retry it.
            HookError: do not retry it, or the budget is spent.
        """
        sent = {name: value for name, value in body.items() if name not in self._refused}
        if body.keys() & self._refused & {"max_tokens"}:
            sent.setdefault(_NEW_LIMIT, body["max_tokens"])
        content = json.dumps(sent).encode()
        connections = await self._connections()
        async with connections.permits:
            reserved = self._budget.reserve(len(content) + _TEMPLATE_BYTES, output_tokens)
            usage: object = None
            worked = True
            try:
                async with asyncio.timeout(self.endpoint.timeout_seconds):
                    reply = await connections.http.post(url, content, self._headers)
                worked = reply.status < 300
                answer = _json(reply.content)
                usage = cast("dict[str, Any]", answer).get("usage") if isinstance(answer, dict) else None
            except ConnectionBrokenError as exc:
                worked = not exc.unsent
                raise _Again(f"{'cannot be reached' if exc.unsent else 'broke the connection'}: {exc}") from exc
            except TimeoutError as exc:
                raise _Again(f"did not answer within {self.endpoint.timeout_seconds:g} s") from exc
            finally:
                self._budget.settle(reserved, usage, worked=worked)
        if worked:
            if answer is None:
                self._fail("judge_unparsable", f"gave an answer that is no JSON: {reply.content[:100]!r}")
            match answer:
                case {"choices": [{"finish_reason": "abort"}, *_]}:
                    raise _Again("stopped in the middle because its weights changed")
                case _:
                    return answer
        message = _message_of(answer, reply.content)
        if reply.status in _NOT_NOW:
            raise _Again(f"answered {reply.status}: {message}", retry_after(reply.headers))
        if reply.status in (400, 422):
            words = message.lower()
            refused = {name for word, names in _OPTIONAL.items() if word in words for name in names} & sent.keys()
            if refused:
                self._refused |= refused
                return await self._once(url, body, output_tokens)
        self._fail("judge_refused", f"answered {reply.status}: {message}")

    async def _connections(self) -> _Connections:
        """Those of the running loop."""
        loop = asyncio.get_running_loop()
        if (connections := self._by_loop.get(loop)) is None:
            for closed in [other for other in list(self._by_loop) if other.is_closed()]:
                # whoever closed it left its generators open
                self._by_loop.pop(closed, None)
            http = HttpClient(proxies=has_proxy(self.endpoint.base_url))
            permits = asyncio.Semaphore(self.endpoint.max_concurrency)
            connections = _Connections(http, permits, self._open_until_the_loop_ends(http))
            self._by_loop[loop] = connections
            await anext(connections.opened)
        return connections

    async def _open_until_the_loop_ends(self, http: HttpClient) -> AsyncGenerator[None]:
        """An event loop closes its asynchronous generators when it ends; a hook has no other time to close
        connections."""
        try:
            yield
        finally:
            self._by_loop.pop(asyncio.get_running_loop(), None)
            await http.close()

    async def aclose(self) -> None:
        """Close the connections of the running loop now, instead of when it ends."""
        if (connections := self._by_loop.get(asyncio.get_running_loop())) is not None:
            await connections.opened.aclose()

    def _fail(self, code: str, why: str, cause: BaseException | None = None) -> NoReturn:
        raise HookError(f"the judge at {self.endpoint.base_url} {why}", code=code) from cause


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _choice(answer: Any) -> dict[str, Any]:
    match answer:
        case {"choices": [dict() as choice, *_]}:
            return cast("dict[str, Any]", choice)
        case {"error": _}:
            # as some servers answer with the status 200
            raise Unparsable(f"it is an error: {_message_of(answer, b'')}")
        case _:
            raise Unparsable("it is no chat completion")


def _message_of(answer: Any, content: bytes) -> str:
    error: Any = cast("dict[str, Any]", answer).get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        return str(cast("dict[str, Any]", error).get("message") or error)[:300]
    return str(error or content[:300].decode(errors="replace") or "nothing")
