"""The way to vLLM: pooled connections, and errors told apart by what helps.

Invariant: whatever vLLM or the network does comes out as one of two errors: its own refusal (passed on as it is), or
something a retry may cure.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from adapters.dialects.jsons import decode, encode
from adapters.dialects.sse import SseDecoder
from swarm.errors import RequestError, UpstreamError
from swarm.http.client import ConnectionBrokenError, HttpClient, LiveAnswer
from swarm.server.dataplane.failures import TransientError, UnreachableError, UpstreamRefusalError
from swarm.server.dataplane.replicas import Replicas

_PROBE_SECONDS = 5.0
_JSON = {"content-type": "application/json"}
_RETRIED_STATUSES = frozenset({500, 502, 503, 504})
#: how vLLM, started without a tool parser, ends its refusal of every request whose ``tool_choice`` is not "none"
_NO_PARSER = "--tool-call-parser to be set"

#: vLLM names the arguments that it was started with, which nobody here has given it
_NO_TOOLS = RequestError(
    "this model cannot call tools here: the engine runs without a parser of its tool calls. Set `job.tool_call_parser` "
    "to the name of one (`auto` finds none where the model's chat template shows no tools), or send the request "
    "with `tool_choice` none",
    code="no_tool_call_parser",
    param="tools",
)

T = TypeVar("T")


class Upstream:
    """A client of vLLM's replicas; :meth:`close` it."""

    def __init__(self) -> None:
        # no timeout of its own: silence is normal while weights are synced, and callers set deadlines
        self._http = HttpClient()
        #: where the calls go
        self.replicas = Replicas(self._answers)

    async def close(self) -> None:
        await self.replicas.close()
        await self._http.close()

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON answer to ``body``.

        Raises:
            UpstreamRefusalError: a 4xx.
            TransientError: a 5xx or a broken connection.
        """
        return await self.ask(url, body, decoded)

    async def ask(self, url: str, body: dict[str, Any], read: Callable[[bytes], T]) -> T:
        """The answer to ``body`` as ``read`` gives it, which raises :class:`ValueError` for what is none.

        Raises:
            As :meth:`post`.
        """
        try:
            answer = await self._http.post(url, encode(body), _JSON)
        except ConnectionBrokenError as exc:
            raise _broken(exc) from exc
        if answer.status != 200:
            raise _failure(answer.status, answer.content, body)
        try:
            return read(answer.content)
        except ValueError as exc:
            raise TransientError(f"vLLM's answer makes no sense: {exc}") from exc

    async def events(self, url: str, body: dict[str, Any]) -> AsyncGenerator[list[dict[str, Any]]]:
        """The chunks of the streamed answer to ``body``, those together that came together; it ends after ``[DONE]``.

        Raises:
            UpstreamRefusalError: a 4xx, by status or as an error event.
            TransientError: a 5xx, an error event, or a stream that breaks off.
        """
        async with self._posted(url, body) as response:
            decoder = SseDecoder()
            async for data in response.parts():
                events = decoder.feed(data)
                done = "[DONE]" in events
                chunks: list[dict[str, Any]] = []
                try:
                    for event in events[: events.index("[DONE]")] if done else events:
                        chunks.append(_chunk(event, body))
                except UpstreamError:
                    if chunks:
                        yield chunks
                    raise
                if chunks:
                    yield chunks
                if done:
                    return
        raise TransientError("vLLM's stream broke off")

    @asynccontextmanager
    async def _posted(self, url: str, body: dict[str, Any]) -> AsyncGenerator[LiveAnswer]:
        """vLLM's 200; an answer that is not read to its end takes its connection with it, and so ends the call there.

        Raises:
            UpstreamRefusalError, TransientError: any other answer, or a connection that breaks, also while it is read.
        """
        try:
            async with self._http.posted(url, encode(body), _JSON) as response:
                if response.status != 200:
                    raise _failure(response.status, await response.read(), body)
                yield response
        except ConnectionBrokenError as exc:
            raise _broken(exc) from exc

    async def _answers(self, address: str) -> bool:
        try:
            return (await self._http.get(f"http://{address}/health", _PROBE_SECONDS)).status == 200
        except ConnectionBrokenError:
            return False


def decoded(content: bytes) -> dict[str, Any]:
    """The object that ``content`` is in JSON.

    Raises:
        ValueError: it is none.
    """
    answer: Any = decode(content)
    if not isinstance(answer, dict):
        raise ValueError(f"no object: {_text(content)[:500]}")
    return cast("dict[str, Any]", answer)


def _chunk(event: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
        chunk: Any = decode(event)
    except ValueError as exc:
        raise TransientError(f"vLLM sent a chunk that is not JSON: {exc}") from exc
    if not isinstance(chunk, dict):
        raise TransientError(f"vLLM sent a chunk that is no object: {event[:500]}")
    shaped = cast("dict[str, Any]", chunk)
    if "error" in shaped:
        code: Any = shaped["error"].get("code") if isinstance(shaped["error"], dict) else None
        if isinstance(code, int) and 400 <= code < 500:
            raise UpstreamRefusalError(code, {"error": shaped["error"]}, _prompt_of(asked))
        raise TransientError(f"vLLM failed: {event[:500]}")
    return shaped


def _broken(exc: ConnectionBrokenError) -> TransientError:
    kind = UnreachableError if exc.unsent else TransientError
    return kind(f"the connection to vLLM failed: {exc}")


def _failure(status: int, content: bytes, asked: Mapping[str, Any]) -> UpstreamError:
    text = _text(content)
    if status in _RETRIED_STATUSES:
        return TransientError(f"vLLM answered {status}: {text[:500]}")
    try:
        payload: Any = decode(content)
    except ValueError:
        payload = None
    if not isinstance(payload, dict) or "error" not in payload:
        payload = {"error": {"message": text[:2000], "type": "invalid_request_error", "param": None, "code": None}}
    error: Any = cast("dict[str, Any]", payload)["error"]
    if isinstance(error, dict) and str(cast("dict[str, Any]", error).get("message")).endswith(_NO_PARSER):
        return UpstreamRefusalError(status, _NO_TOOLS.body())
    return UpstreamRefusalError(status, payload, _prompt_of(asked))


def _prompt_of(asked: Mapping[str, Any]) -> str:
    """Where the prompt of a request stands."""
    return next((name for name in ("prompt", "input") if name in asked), "messages")


def _text(content: bytes) -> str:
    return content.decode(errors="replace")
