"""One small HTTP client for all judges of an endpoint: concurrency, retries, budget and cache in one place.

Invariant: a call ends with a parsed answer or a ``HookError`` that says why, is tried a bounded number of times, and
never passes the endpoint's caps; at most ``max_concurrency`` calls are in flight over all groups, each on a connection
that they share.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from typing import Any, NoReturn, TypeVar, cast

import httpx

from reward_hooks.judges.endpoint import Budget, Endpoint, Spending
from swarm.errors import HookError

T = TypeVar("T")

#: "Not now": the request may be repeated.
_NOT_NOW = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
#: Fields that servers may refuse, by the words with which they do so; a call is as good without them.
_OPTIONAL = {"logprob": ("logprobs", "top_logprobs"), "response_format": ("response_format",)}
_OPTIONAL["json_schema"] = _OPTIONAL["response_format"]
#: Bytes of a prompt's chat template beyond the body.
_TEMPLATE_BYTES = 512


class Unparsable(ValueError):
    """A judge's answer that says no verdict; raised by parsers, told as ``judge_unparsable``."""


class _Again(Exception):
    """A try that may be repeated, after at least ``pause`` seconds."""

    def __init__(self, why: str, pause: float = 0.0) -> None:
        super().__init__(why)
        self.pause = pause


class _Leaner(Exception):
    """The server refuses fields that the call is as good without."""


class JudgeClient:
    """Calls one endpoint; safe for concurrent use, and shared by all judges that should share its limits.

    Its connections belong to the event loop that it is first used in and are closed when that loop ends; used in
    another loop, it opens new ones. Counts, caps and cache go on.

    Raises:
        ConfigError: the key's environment variable is not set.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._headers = {"content-type": "application/json", **endpoint.headers()}
        self._budget = Budget(endpoint)
        self._cache: OrderedDict[str, Any] = OrderedDict()
        self._refused: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient | None = None
        self._closer: AsyncGenerator[httpx.AsyncClient] | None = None
        self._places = asyncio.Semaphore(endpoint.max_concurrency)

    @property
    def spent(self) -> Spending:
        """What this client has spent so far."""
        return self._budget.spent

    async def chat(self, body: dict[str, Any], parse: Callable[[dict[str, Any]], T], *, kind: str) -> T:
        """``POST {base_url}/chat/completions``; ``parse`` gets the first choice.

        Fields that the server refuses although the call is as good without them (log-probabilities, a response format)
        are left out from then on.

        Raises:
            HookError: see :meth:`post`.
        """
        url = f"{self.endpoint.base_url.rstrip('/')}/chat/completions"
        most = int(body.get("max_tokens") or 0)
        return await self.post(url, body, lambda answer: parse(_choice(answer)), kind=kind, output_tokens=most)

    async def post(
        self, url: str, body: dict[str, Any], parse: Callable[[Any], T], *, kind: str, output_tokens: int = 0
    ) -> T:
        """The parsed answer to one JSON request, from the cache if the same was asked before.

        Args:
            url: where to.
            body: what is asked; ``model`` and ``extra_body`` of the endpoint are added.
            parse: makes the result of the answer's JSON; raises :class:`Unparsable` where it says nothing.
            kind: names how the answer is read: results are kept by it and by what was asked.
            output_tokens: the most tokens that the answer can have, for the budget.

        Raises:
            HookError: ``judge_budget``, ``judge_unavailable`` (no answer after all tries), ``judge_refused`` (an error
                that repeating cannot cure) or ``judge_unparsable``.
        """
        model = {"model": self.endpoint.model} if self.endpoint.model else {}
        body = {**model, **body, **self.endpoint.extra_body}
        key = hashlib.sha256(json.dumps([kind, url, body], sort_keys=True).encode()).hexdigest()
        if key in self._cache:
            self._cache.move_to_end(key)
            self._budget.count("cache_hits")
            return cast(T, self._cache[key])
        try:
            result = self._parsed(await self._answer(url, body, output_tokens), parse)
        except HookError:
            self._budget.count("failures")
            raise
        self._cache[key] = result
        while len(self._cache) > self.endpoint.cache_entries:
            self._cache.popitem(last=False)
        return result

    def _parsed(self, answer: Any, parse: Callable[[Any], T]) -> T:
        try:
            return parse(answer)
        except Unparsable as exc:
            self._fail("judge_unparsable", f"gave an answer that cannot be read: {exc}", exc)
        except (LookupError, TypeError, ValueError, AttributeError) as exc:  # JSON of another shape
            self._fail("judge_unparsable", f"gave an answer of another shape ({type(exc).__name__}: {exc})", exc)

    async def _answer(self, url: str, body: dict[str, Any], output_tokens: int) -> Any:
        failures = 0
        while True:
            sent = {name: value for name, value in body.items() if name not in self._refused}
            try:
                return await self._once(url, sent, output_tokens)
            except _Leaner:
                continue  # ends: the next one lacks what was refused
            except _Again as exc:
                failures += 1
                if failures >= self.endpoint.attempts:
                    self._fail("judge_unavailable", f"{exc} (tries: {failures})", exc)
                if exc.pause > self.endpoint.retry_cap_seconds:
                    self._fail("judge_unavailable", f"{exc}, and asks to wait {exc.pause:g} s", exc)
                pause = max(self._pause(failures), exc.pause)
            await asyncio.sleep(pause)
            self._budget.count("retries")

    async def _once(self, url: str, body: dict[str, Any], output_tokens: int) -> Any:
        """One try: the answer's JSON.

        Raises:
            _Again: it may be repeated.
            _Leaner: it may be repeated at once, without the fields in ``self._refused``.
            HookError: it may not, or the budget is gone.
        """
        content = json.dumps(body).encode()
        http = self._client()
        async with self._places:
            reserved = self._budget.reserve(len(content) + _TEMPLATE_BYTES, output_tokens)
            usage: object = None
            worked = True
            try:
                reply = await http.post(url, content=content, headers=self._headers)
                worked = reply.is_success
                answer = _json(reply)
                usage = cast("dict[str, Any]", answer).get("usage") if isinstance(answer, dict) else None
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as exc:
                worked = False
                raise _Again(f"cannot be reached: {exc or type(exc).__name__}") from exc
            except httpx.TimeoutException as exc:
                raise _Again(f"did not answer within {self.endpoint.timeout_seconds:g} s") from exc
            except httpx.TransportError as exc:
                raise _Again(f"broke the connection: {exc or type(exc).__name__}") from exc
            except httpx.HTTPError as exc:
                worked = False
                self._fail("judge_refused", f"answered nonsense: {exc or type(exc).__name__}", exc)
            finally:
                if worked:
                    self._budget.settle(reserved, usage)
                else:
                    self._budget.release(reserved)
        if reply.is_success:
            if answer is None:
                self._fail("judge_unparsable", f"gave an answer that is no JSON: {reply.text[:100]!r}")
            if _aborted(answer):
                raise _Again("stopped in the middle because its weights changed")
            return answer
        said = _said(answer, reply)
        if reply.status_code in _NOT_NOW:
            raise _Again(f"answered {reply.status_code}: {said}", _retry_after(reply))
        if reply.status_code in (400, 422):
            words = said.lower()
            refused = {name for word, names in _OPTIONAL.items() if word in words for name in names} & body.keys()
            if refused:
                self._refused |= refused
                raise _Leaner
        self._fail("judge_refused", f"answered {reply.status_code}: {said}")

    def _client(self) -> httpx.AsyncClient:
        """The connections of the running loop."""
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            limit = self.endpoint.max_concurrency
            self._http = httpx.AsyncClient(
                timeout=httpx.Timeout(self.endpoint.timeout_seconds, connect=min(10.0, self.endpoint.timeout_seconds)),
                limits=httpx.Limits(max_connections=limit, max_keepalive_connections=limit, keepalive_expiry=4.0),
            )
            self._loop, self._places = loop, asyncio.Semaphore(limit)
            self._closer = _closed_with_its_loop(self._http)
            # run to its yield, where nothing is awaited: from then on the loop knows it
            with contextlib.suppress(StopIteration):
                self._closer.__anext__().__await__().send(None)
        return self._http

    async def aclose(self) -> None:
        """Close the connections now, instead of when the event loop ends."""
        closer, self._closer, self._http = self._closer, None, None
        if closer is not None:
            await closer.aclose()

    def _pause(self, failures: int) -> float:
        ceiling = min(self.endpoint.retry_cap_seconds, self.endpoint.retry_base_seconds * 2 ** (failures - 1))
        return ceiling * random.uniform(0.5, 1.0)

    def _fail(self, code: str, why: str, cause: BaseException | None = None) -> NoReturn:
        raise HookError(f"the judge at {self.endpoint.base_url} {why}", code=code) from cause


async def _closed_with_its_loop(http: httpx.AsyncClient) -> AsyncGenerator[httpx.AsyncClient]:
    """A loop that ends closes its asynchronous generators: hooks have no other end at which to close connections."""
    try:
        yield http
    finally:
        await http.aclose()


def _json(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        return None


def _choice(answer: Any) -> dict[str, Any]:
    choices: Any = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Unparsable("it is no chat completion")
    return cast("dict[str, Any]", choices[0])


def _aborted(answer: Any) -> bool:
    """Whether vLLM gave up in the middle, as it does when the model it serves gets new weights."""
    try:
        return _choice(answer).get("finish_reason") == "abort"
    except Unparsable:
        return False


def _said(answer: Any, reply: httpx.Response) -> str:
    error: Any = cast("dict[str, Any]", answer).get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        return str(cast("dict[str, Any]", error).get("message") or error)[:300]
    return str(error or reply.text[:300] or "nothing")


def _retry_after(reply: httpx.Response) -> float:
    try:
        seconds = float(reply.headers.get("retry-after", 0))
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < float("inf") else 0.0
