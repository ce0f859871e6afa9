"""The client of vLLM: requests, streamed responses, their errors, and retries.

Invariant: every failure of vLLM or of the network is either vLLM's own refusal, which the caller gets as it is, or a
:class:`TransientError`, which a retry may cure. Retries are capped, with a pause before each.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, cast

from msgspec import MsgspecError

from adapters.dialects.jsons import decode, encode, object_in
from adapters.dialects.sse import SseDecoder
from swarm.concurrency import backoff
from swarm.errors import ContextLengthError, RequestError, UpstreamError
from swarm.http.client import ConnectionBrokenError, HttpClient
from swarm.job import TrainJob

Body = dict[str, Any]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_PROBE_SECONDS = 5.0
_JSON = {"content-type": "application/json"}
_RETRIED_STATUSES = frozenset({500, 502, 503, 504})
#: The end of the refusal of a vLLM without a tool parser, for every request whose ``tool_choice`` is not "none".
_NO_PARSER = "--tool-call-parser to be set"
#: vLLM's own text names command-line arguments, which nobody here has set.
_NO_TOOLS = RequestError(
    "this model cannot call tools here: the engine runs without a parser of its tool calls. Set `job.tool_call_parser` "
    "to the name of one (`auto` finds none where the model's chat template shows no tools), or send the request "
    "with `tool_choice` none",
    code="no_tool_call_parser",
    param="tools",
)
#: The words of vLLM 0.24 and 0.28 for a prompt and answer that do not fit (``renderers/params.py``,
#: ``v1/engine/input_processor.py``)
_TOO_LONG = re.compile(
    r"maximum context length is (?P<limit>\d+) tokens\. However, you requested (?P<answer>\d+) output tokens and your "
    r"prompt contains (?:(?P<least>at least )?(?P<prompt>\d+) input tokens|\d+ characters \(more than \d+ characters, "
    r"which is the upper bound for (?P<room>\d+) input tokens)"
    r"|prompt \(length (?P<length>\d+)\).* is longer than the maximum model length of (?P<most>\d+)"
)

#: How vLLM begins to say that it has no grammar for a JSON schema.
_NOT_GUIDED = (
    "Grammar error:",
    "Failed to transform json schema",
    "Invalid JSON grammar",
    "The provided JSON schema contains features not supported",
)


class UpstreamRefusalError(UpstreamError):
    """vLLM refused the request (a context too long, a bad field); its status and body go to the caller.

    ``param`` is the field that holds the prompt: ``messages``, ``prompt`` or ``input``.
    """

    def __init__(self, status: int, payload: Body, param: str = "messages") -> None:
        super().__init__(f"vLLM answered {status}")
        self.status = status
        self.param = param
        self._payload = payload

    def body(self) -> Body:
        return self._payload

    @property
    def words(self) -> str:
        """vLLM's own; empty without any."""
        error: Any = self._payload.get("error")
        return str(error.get("message")) if isinstance(error, dict) else ""


class TransientError(UpstreamError):
    """vLLM aborted, failed or could not be reached; the same request may succeed in a moment."""


class AbortedError(TransientError):
    """vLLM aborted the call because it replaces its weights."""

    def __init__(self) -> None:
        super().__init__("vLLM aborted the call")


class UnreachableError(TransientError):
    """No connection to this replica could be made; nothing was sent."""


class Retries:
    """The attempts of one call: a cap, and pauses with jitter that double up to two seconds."""

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._failures = 0

    async def after(self, error: TransientError) -> None:
        """Pause before the next attempt.

        Raises:
            UpstreamError: no attempt is left.
        """
        self._failures += 1
        if self._failures >= self._attempts:
            raise UpstreamError(f"the engine could not complete the call: {error.message}") from error
        await asyncio.sleep(backoff(self._failures, _FIRST_PAUSE, _LONGEST_PAUSE))


class ReplicaClient:
    """A client of vLLM's replicas; :meth:`close` it."""

    def __init__(self) -> None:
        # no timeout of its own: silence is normal while weights are synced, and callers set deadlines
        self._http = HttpClient()

    async def close(self) -> None:
        await self._http.close()

    async def post(self, url: str, body: Body, read: Callable[[bytes], Any] = decode) -> Body:
        """The JSON response to ``body``; what ``read`` cannot read is read as any JSON.

        Raises:
            UpstreamRefusalError: a 4xx.
            TransientError: a 5xx, a broken connection, or a response that is not a JSON object.
        """
        try:
            answer = await self._http.post(url, encode(body), _JSON)
        except ConnectionBrokenError as exc:
            raise _broken(exc) from exc
        if answer.status != 200:
            raise _failure(answer.status, answer.content, body)
        return _object(answer.content, read)

    async def events(self, url: str, body: Body) -> AsyncGenerator[list[Body]]:
        """The chunks of the streamed response to ``body``, in lists of those that arrived together, until ``[DONE]``.

        Raises:
            UpstreamRefusalError: a 4xx, as the status or in an error event.
            TransientError: a 5xx, an error event, or a stream that ends early.
        """
        try:
            # leaving before its end closes the connection, which cancels the call in vLLM
            async with self._http.posted(url, encode(body), _JSON) as response:
                if response.status != 200:
                    raise _failure(response.status, await response.read(), body)
                decoder = SseDecoder()
                async for data in response.parts():
                    events = decoder.feed(data)
                    done = "[DONE]" in events
                    if done:
                        events = events[: events.index("[DONE]")]
                    if events:
                        yield [_chunk(event, body) for event in events]
                    if done:
                        return
        except ConnectionBrokenError as exc:
            raise _broken(exc) from exc
        raise TransientError("vLLM's stream broke off")

    async def is_healthy(self, address: str) -> bool:
        """Whether the replica at ``address`` answers ``GET /health`` with 200."""
        try:
            return (await self._http.get(f"http://{address}/health", _PROBE_SECONDS)).status == 200
        except ConnectionBrokenError:
            return False


def too_long(refusal: UpstreamRefusalError, job: TrainJob) -> ContextLengthError | None:
    """``refusal`` in the words that SDKs look for, if it says that the prompt, or it and the answer, are too long."""
    if (match := _TOO_LONG.search(refusal.words)) is None:
        return None
    limit, answer = int(match["limit"] or match["most"]), int(match["answer"] or 0)
    # a prompt of too many characters is refused before its tokens are counted
    prompt = int(match["prompt"] or match["length"] or int(match["room"]) + 1)
    at_least = match["least"] is not None or match["room"] is not None
    if at_least and answer:
        # vLLM stopped reading the prompt where no room was left for the answer
        limit, answer = limit - answer, 0
    fits = prompt < limit
    return ContextLengthError(
        limit=limit,
        prompt_tokens=prompt,
        answer_tokens=answer if fits else 0,
        at_least=at_least,
        param=refusal.param,
        hint=(
            f"Whoever runs the training job can raise job.max_prompt_length (now {job.max_prompt_length}; with "
            f"job.max_response_length, {job.max_response_length}, it makes the context)."
        ),
    )


def not_guided(refusal: UpstreamRefusalError) -> RequestError | None:
    """``refusal`` with what to do about it, if it says that vLLM cannot hold an answer to a schema."""
    if refusal.status != 400 or not refusal.words.startswith(_NOT_GUIDED):
        return None
    return RequestError(
        "the engine cannot hold an answer to the JSON schema of this request, which is that of response_format, of a "
        f"tool that tool_choice forces, or of a strict tool: {refusal.words[:500]}. Leave that out of the schema; "
        "tools that the model may call or not, and that are not strict, are called without such a check.",
        code="schema_not_supported",
    )


def _object(content: bytes | str, read: Callable[[Any], Any] = decode) -> Body:
    """The JSON object in ``content``; raises :class:`TransientError` for anything else."""
    try:
        try:
            value = read(content)
        except MsgspecError:
            value = decode(content)
    except ValueError as exc:
        raise TransientError(f"vLLM sent something that is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise TransientError(f"vLLM sent something that is not an object: {str(value)[:500]}")
    return cast("Body", value)


def _chunk(event: str, asked: Mapping[str, Any]) -> Body:
    chunk = _object(event)
    if "error" in chunk:
        code: Any = chunk["error"].get("code") if isinstance(chunk["error"], dict) else None
        if isinstance(code, int) and 400 <= code < 500:
            raise UpstreamRefusalError(code, {"error": chunk["error"]}, _prompt_field(asked))
        raise TransientError(f"vLLM failed: {event[:500]}")
    return chunk


def _broken(exc: ConnectionBrokenError) -> TransientError:
    kind = UnreachableError if exc.unsent else TransientError
    return kind(f"the connection to vLLM failed: {exc}")


def _failure(status: int, content: bytes, asked: Mapping[str, Any]) -> UpstreamError:
    text = content.decode(errors="replace")
    if status in _RETRIED_STATUSES:
        return TransientError(f"vLLM answered {status}: {text[:500]}")
    payload = object_in(content) or {}
    if "error" not in payload:
        payload = {"error": {"message": text[:2000], "type": "invalid_request_error", "param": None, "code": None}}
    refusal = UpstreamRefusalError(status, payload, _prompt_field(asked))
    return UpstreamRefusalError(status, _NO_TOOLS.body()) if refusal.words.endswith(_NO_PARSER) else refusal


def _prompt_field(asked: Mapping[str, Any]) -> str:
    return next((name for name in ("prompt", "input") if asked.get(name) is not None), "messages")
