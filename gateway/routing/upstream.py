"""A plain OpenAI-compatible upstream: answers without training anything.

Invariant: its answer reaches the application as it came, in the application's dialect; its key goes to it alone, and
opens nothing there but what is below its ``base_url``. A forwarded path means there what it means here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, Self, cast
from urllib.parse import quote, unquote, urlsplit

from adapters.dialects import DIALECTS, ResponsesDialect, SampledAnswer, to_json
from adapters.dialects.jsons import error_in, object_in
from adapters.dialects.sse import data_in
from gateway.config.route import UpstreamConfig
from gateway.routing.breaker import Breaker, BreakerState
from gateway.types import AnyRequest, Decided, Incoming, Live, Outcome, Relayed
from swarm.concurrency import backoff
from swarm.errors import NotFoundError, OverloadedError, RelayedError, UnavailableError, UpstreamError
from swarm.http.client import ConnectionBrokenError, HttpClient, LiveAnswer, has_proxy, retry_after

logger = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
#: Dialects that can be translated to a chat.
_TRANSLATED = frozenset(dialect.path for dialect in DIALECTS if dialect.translatable)
#: Addresses that ask the upstream's model; others, such as for embeddings, have models of their own.
_MODELS_OWN = tuple(dialect.path for dialect in DIALECTS)
#: Of vLLM's chats alone.
_GOING_ON = ("add_generation_prompt", "continue_final_message")
#: The application's headers that select a version of its dialect.
_SENT_ON = ("anthropic-version", "anthropic-beta", "openai-beta")
_PASSED_ON = ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "cache-control")
_PASSED_ON_PREFIXES = ("x-ratelimit-", "anthropic-ratelimit-")
#: Deadline of its list of models.
_LIST_SECONDS = 10.0
_RETRY_PAUSE = 0.2
#: Seconds until a dialect that the upstream lacks is tried again.
_SILENT_SECONDS = 600.0
_NO_ROUTE = frozenset({404, 405, 501})
#: more than anybody means; each takes time in the length of the path
_MOST_DECODINGS = 8
#: Of a decoded path, what is sent as it is; a question mark in it begins no query.
_PLAIN = "/:@!$&'()*+,;=~"


class Upstream:
    """One upstream behind its breaker; an async context manager.

    Args:
        config: where it is.
        timeout: seconds until an answer begins, a plain one ends, and between two parts of a stream.

    Attributes:
        breaker: its breaker.
    """

    def __init__(self, config: UpstreamConfig, timeout: float) -> None:
        self._base = config.base_url.rstrip("/")
        self._key = config.api_key.get_secret_value()
        self._model = config.model
        self._timeout = timeout
        self._name = f"the upstream {urlsplit(config.base_url).netloc.rpartition('@')[2]}"
        self._http = HttpClient(proxies=has_proxy(config.base_url))
        self.breaker = Breaker(self._name)
        #: paths of dialects that it lacks, and until when that is taken for true
        self._unspoken: dict[str, float] = {}
        #: paths of dialects that it answered: a 404 there is of something that a request names
        self._spoken: set[str] = set()

    @property
    def available(self) -> bool:
        """Whether a request would be let through now."""
        return self.breaker.state is not BreakerState.OPEN

    async def relay(self, incoming: Incoming, reason: str) -> Outcome:
        """Send ``incoming`` in its own dialect; or as a chat where the upstream lacks it, whose outcome is then
        rendered like any other.

        Args:
            reason: why nothing is trained; returned as ``x-swarm-drop-reason``, empty for none.

        Raises:
            RelayedError: it refuses a translated chat.
            UnavailableError: it cannot be reached, or its breaker is open.
            UpstreamError: it broke off, gave no answer in time, or refuses the gateway's key.
        """
        untrained = {"x-swarm-trained": "false"} | ({"x-swarm-drop-reason": reason} if reason else {})
        path, stream = incoming.path, incoming.call.stream
        refused: Relayed | None = None
        now = asyncio.get_running_loop().time()
        if now >= self._unspoken.get(path, 0.0) and not (incoming.values and path in _TRANSLATED):
            sent_on = {name: incoming.headers[name] for name in _SENT_ON if name in incoming.headers}
            relayed = await self._send("POST", path, self._body(incoming), sent_on, stream=stream, query=incoming.query)
            relayed = Relayed(relayed.status, {**relayed.headers, **untrained}, relayed.body, relayed.close)
            if relayed.status == 200:
                self._spoken.add(path)
            if path not in _TRANSLATED or not self.lacks(path, relayed):
                return relayed
            refused = relayed
        chat = await self._send("POST", CHAT, self._chat_body(incoming), {}, stream=stream)
        if refused is not None:
            if _is_nowhere(chat):
                return refused
            self._unspoken[path] = now + _SILENT_SECONDS
        return _read_chat(chat, untrained)

    def lacks(self, path: str, outcome: Outcome) -> bool:
        """Whether it says that it has no ``path``, which it never answered."""
        return path not in self._spoken and _is_nowhere(outcome)

    async def forward(self, request: AnyRequest) -> Relayed:
        """Send any other request (embeddings, ...) as it came, with those headers that describe the body, and with the
        upstream's name of its model where that is asked; the answer comes in parts.

        Raises:
            NotFoundError: the path has dots, which would lead out of the upstream's ``base_url`` or nowhere.
            UnavailableError, UpstreamError: as :meth:`relay`.
        """
        headers = request.headers
        kept = {
            name: headers[name] for name in ("content-type", "content-encoding", "accept", *_SENT_ON) if name in headers
        }
        path = quote(request.path, safe=_PLAIN)
        body = request.body
        if self._model and request.path.startswith(_MODELS_OWN) and "model" in (asked := object_in(body) or {}):
            body = to_json({**asked, "model": self._model})
        relayed = await self._send(request.method, path, body, kept, stream=True, query=request.query)
        return Relayed(relayed.status, {**relayed.headers, "x-swarm-trained": "false"}, relayed.body, relayed.close)

    async def models(self) -> list[dict[str, Any]]:
        """The model cards that it lists; empty if it fails, which must not hide other routes."""
        if not self.available:
            return []
        try:
            answer = await self._http.get(f"{self._base}/models", _LIST_SECONDS, self._headers({}))
        except ConnectionBrokenError as exc:
            logger.warning("listing the models of %s failed: %s", self._name, exc)
            return []
        cards = (object_in(answer.content) or {}).get("data") if answer.status == 200 else None
        if not isinstance(cards, list):
            return []
        return [card for card in cast("list[Any]", cards) if isinstance(card, dict) and "id" in card]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    # ------------------------------------------------------------------ the request

    def _body(self, incoming: Incoming) -> bytes:
        if incoming.values:
            asked: dict[str, Any] = json.loads(incoming.raw)
            body = {name: value for name, value in incoming.call.body.items() if name in asked}
            if "prompt" in body:
                # a raw prompt asks for log-probabilities in another way than a chat, which knows no echo
                body |= {name: asked[name] for name in ("logprobs", "echo") if asked.get(name) is not None}
            return to_json({**body, "model": self._model} if self._model else body)
        if self._model is None:
            return bytes(incoming.raw)
        return to_json({**json.loads(incoming.raw), "model": self._model})

    def _chat_body(self, incoming: Incoming) -> bytes:
        # where OpenAI stores nothing, it refuses metadata in a chat; and it goes on from no response that was cut
        left = ("metadata", *(_GOING_ON if incoming.path == ResponsesDialect.path else ()))
        body = {name: value for name, value in incoming.call.body.items() if name not in left}
        if "stream_options" in body:
            # other servers need not know vLLM's own
            body["stream_options"] = {"include_usage": True}
        return to_json({**body, "model": self._model} if self._model else body)

    def _headers(self, more: Mapping[str, str]) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept-encoding": "identity", **more}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
            if "anthropic-version" in more:
                headers["x-api-key"] = self._key
        return headers

    # ------------------------------------------------------------------ sending

    async def _send(
        self, method: str, path: str, body: bytes, more: Mapping[str, str], *, stream: bool, query: str = ""
    ) -> Relayed:
        if _has_dots(path):
            raise NotFoundError("a path below /v1 has no parts of dots, which lead elsewhere", param="path")
        url = self._base + path.removeprefix("/v1") + (f"?{query}" if query else "")
        async with AsyncExitStack() as held:
            with self.breaker.call() as call:
                try:
                    async with asyncio.timeout(self._timeout):
                        answer = await self._reached(held, method, url, body, self._headers(more))
                        whole = None if stream and answer.status == 200 else await answer.read()
                except TimeoutError:
                    late = f"{self._name} gave no answer in time"
                    raise UpstreamError(late, code="upstream_timeout", status=504) from None
                except ConnectionBrokenError as exc:
                    raise self._broken(exc) from exc
                call.failed = answer.status >= 500
            self._check(answer.status)
            headers = {
                low: _asgi(value)
                for name, value in answer.headers.items()
                if (low := name.lower()) in _PASSED_ON or low.startswith(_PASSED_ON_PREFIXES)
            }
            if whole is not None:
                return Relayed(answer.status, headers, whole)
            return Relayed(answer.status, headers, self._parts(answer), held.pop_all().aclose)

    async def _reached(
        self, stack: AsyncExitStack, method: str, url: str, body: bytes, headers: Mapping[str, str]
    ) -> LiveAnswer:
        """The beginning of the answer; a second try where the first was certainly not read."""
        try:
            return await stack.enter_async_context(self._http.posted(url, body, headers, method=method))
        except ConnectionBrokenError as exc:
            if not exc.unsent:
                raise
        await asyncio.sleep(backoff(1, _RETRY_PAUSE, _RETRY_PAUSE))
        return await stack.enter_async_context(self._http.posted(url, body, headers, method=method))

    async def _parts(self, answer: LiveAnswer) -> AsyncIterator[bytes]:
        parts = answer.parts()
        try:
            while True:
                async with asyncio.timeout(self._timeout):
                    part = await anext(parts, None)
                if part is None:
                    return
                yield part
        except TimeoutError:
            raise UpstreamError(f"{self._name} fell silent", code="upstream_timeout") from None
        except ConnectionBrokenError as exc:
            raise self._broken(exc) from exc

    def _broken(self, exc: ConnectionBrokenError) -> UnavailableError | UpstreamError:
        # of a malformed address or header it quotes the address, whose password is a secret
        why = "" if isinstance(exc.__cause__, ValueError) else f": {exc}"
        if exc.unsent:
            return UnavailableError(
                f"{self._name} cannot be reached{why}", code="upstream_unreachable", retry_after=2.0
            )
        # as an SDK would ask an upstream again whose connection broke
        return UpstreamError(f"{self._name} broke off{why}", code="upstream_broke_off", retry_after=1.0)

    def _check(self, status: int) -> None:
        if status == 401:
            # not the application's fault, and some servers quote the refused key
            raise UpstreamError(f"{self._name} refuses the gateway's api_key", code="upstream_refuses_key")
        if 300 <= status < 400:
            raise UpstreamError(f"{self._name} redirects: set base_url to where it leads", code="upstream_redirects")


def _has_dots(path: str) -> bool:
    """Whether a path has parts of one or two dots, which lead upwards or nowhere, also once clients and servers on the
    way have decoded it; what is encoded more than :data:`_MOST_DECODINGS` times is not looked into."""
    for _ in range(_MOST_DECODINGS):
        if not {".", ".."}.isdisjoint(re.split(r"[/\\]", path)):
            return True
        path, encoded = unquote(path), path
        if path == encoded:
            return False
    return True


def _asgi(value: str) -> str:
    """aiohttp reads UTF-8 where ASGI wants a character for each byte."""
    return value.encode("utf-8", "surrogateescape").decode("latin-1")


# ------------------------------------------------------------------ a chat's answer for another dialect


def _is_nowhere(relayed: Outcome) -> bool:
    """Whether an answer says that the address does not exist, rather than the model or what else a request names."""
    if not isinstance(relayed, Relayed) or relayed.status not in _NO_ROUTE:
        return False
    error = _error(relayed.body)
    return not error.get("param") and "model" not in f"{error.get('code')} {error.get('message')}".lower()


def _read_chat(relayed: Relayed, headers: Mapping[str, str]) -> Decided | Live:
    """A chat's answer as an outcome.

    Args:
        relayed: whole, or a stream of events.
        headers: of the outcome.

    Raises:
        RelayedError, UnavailableError, UpstreamError: it is an error.
    """
    if relayed.status != 200:
        raise _failure(relayed)
    if not isinstance(relayed.body, bytes):
        return Live(_chunks(relayed.body), headers, relayed.close)
    completion = _object(relayed.body)
    # which raises where it is no answer
    SampledAnswer.from_completion(completion)
    return Decided(completion, headers)


async def _chunks(body: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any]]:
    async for event in data_in(body, ends=False):
        yield _object(event)


def _failure(relayed: Relayed) -> RelayedError | UnavailableError | UpstreamError:
    error = _error(relayed.body)
    message = str(error.get("message") or f"the upstream answered {relayed.status}")
    wait = retry_after(relayed.headers) or 1.0
    if relayed.status in (429, 503):
        busy = OverloadedError if relayed.status == 429 else UnavailableError
        return busy(message, code="upstream_busy", retry_after=wait)
    if relayed.status < 500:
        return RelayedError(relayed.status, {**error, "message": message})
    return UpstreamError(message, code="upstream_failed", retry_after=wait)


def _error(body: bytes | AsyncIterator[bytes]) -> dict[str, Any]:
    return error_in(body) if isinstance(body, bytes) else {}


def _object(text: bytes | str) -> dict[str, Any]:
    if (fields := object_in(text)) is None:
        raise UpstreamError("the upstream's answer is not a JSON object", code="malformed_answer")
    if fields.get("error"):
        message = error_in(text).get("message") or "the upstream failed in the middle of its answer"
        raise UpstreamError(str(message), code="upstream_error")
    return fields
