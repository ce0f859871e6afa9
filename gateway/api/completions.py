"""``/v1/completions``: each prompt of a request runs as its own request, and their answers come back as one.

Invariant: choice ``k * n + j`` is answer ``j`` to prompt ``k``; if one prompt fails, the request fails and the
others are cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, cast

from adapters.dialects import CompletionsDialect, LLMRequest
from adapters.dialects.completions import prompts_of
from adapters.dialects.jsons import encode, error_in, object_in
from adapters.dialects.sse import DONE, data_in, encode_event
from gateway.api.endpoint import DialectEndpoint
from gateway.api.exchange import parts_of
from gateway.data.consent import Consent
from gateway.runtime import Gateway
from gateway.types import Decided, Incoming, Live, Outcome, Relayed
from swarm.concurrency import all_of, end_tasks
from swarm.errors import RequestError, UpstreamError

#: Each prompt is a whole group of samples.
_MOST_PROMPTS = 128
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")

#: Notes the ids of the parts of an answer, or of a request, by its own.
_Listed = Callable[[str, Sequence[str]], None]


class CompletionsEndpoint(DialectEndpoint):
    """The model's answers to raw prompts."""

    def __init__(self) -> None:
        super().__init__(CompletionsDialect())

    def parsed(self, data: dict[str, Any]) -> LLMRequest:
        prompts = prompts_of(data)
        if len(prompts) > _MOST_PROMPTS:
            raise RequestError(f"prompt: at most {_MOST_PROMPTS} prompts per call", param="prompt")
        return self.dialect.parse({**data, "prompt": prompts[0]})

    async def answer(self, gateway: Gateway, incoming: Incoming, data: Mapping[str, Any]) -> Outcome:
        prompts = prompts_of(data)
        # a plain upstream gets the request as it came
        if len(prompts) == 1 or await gateway.pipeline.is_plain(incoming.call.model, incoming.caller, alone=True):
            return await gateway.pipeline.answer(incoming)
        bodies = [{**data, "prompt": prompt} for prompt in prompts]
        incoming.prospect.needed = len(bodies)
        choices = incoming.call.choices

        def listed(name: str, parts: Sequence[str]) -> None:
            gateway.sessions.listed(incoming.caller.key_id, name, parts, choices)

        request_ids = [f"{incoming.request_id}.{number}" for number in range(len(bodies))]
        listed(incoming.request_id, request_ids)
        async with AsyncExitStack() as held:
            request = await held.enter_async_context(gateway.pipeline.placed(incoming))

            async def ask(body: dict[str, Any], number: int) -> Outcome:
                asked = replace(
                    request,
                    call=self.dialect.parse(body),
                    headers=_headers(incoming.headers, number),
                    raw=encode(body),
                    request_id=request_ids[number],
                    consent=Consent(),
                )
                outcome = await gateway.pipeline.answer(asked)
                if outcome.close is not None:
                    held.push_async_callback(outcome.close)
                return outcome

            outcomes = await all_of(ask(body, number) for number, body in enumerate(bodies))
            for outcome in outcomes:
                if isinstance(outcome, Relayed) and outcome.status != 200:
                    return replace(outcome, close=held.pop_all().aclose)
            answered = list(zip(bodies, outcomes, strict=True))
            headers = {"x-swarm-trained": _trained(outcomes)}
            if incoming.call.stream:
                streams = _merged([self._chunks(*answer) for answer in answered], choices, listed)
                held.push_async_callback(streams.aclose)
                headers["content-type"] = "text/event-stream; charset=utf-8"
                return Relayed(200, headers, streams, held.pop_all().aclose)
            joined = _joined([self._body(*answer) for answer in answered], choices, listed)
            return Relayed(200, headers | {"content-type": "application/json"}, encode(joined), held.pop_all().aclose)

    def _body(self, data: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
        """The ``text_completion`` of one prompt; :class:`UpstreamError`: the upstream gave none."""
        match outcome:
            case Decided(completion=completion):
                return self.dialect.answer(data, completion)
            case Relayed(body=bytes() as body):
                return _object(body)
            case _:
                raise UpstreamError("a stream came where none was asked for", code="malformed_answer")

    async def _chunks(self, data: dict[str, Any], outcome: Outcome) -> AsyncIterator[dict[str, Any]]:
        """The chunks of the stream of one prompt; :class:`UpstreamError`: the upstream gave none."""
        if isinstance(outcome, Decided | Live):
            parts = parts_of(outcome, self.dialect.stream(data))
        elif isinstance(outcome.body, bytes):
            raise UpstreamError("the upstream gave no stream where one was asked for", code="malformed_answer")
        else:
            parts = outcome.body
        async for event in data_in(parts):
            yield _object(event)


def _object(text: bytes | str) -> dict[str, Any]:
    """An answer or chunk as JSON; raises :class:`UpstreamError` for anything else."""
    fields = object_in(text) or {}
    choices: Any = fields.get("choices")
    if isinstance(choices, list) and all(isinstance(choice, dict) for choice in cast("list[Any]", choices)):
        return fields
    message = error_in(text).get("message")
    raise UpstreamError(str(message or "the upstream's answer has no choices"), code="malformed_answer")


def _headers(headers: Mapping[str, str], number: int) -> dict[str, str]:
    """The headers of prompt ``number``: an idempotency key names one request, and each prompt is one; an equal one is
    no retry."""
    key = headers.get("idempotency-key")
    return {**headers, "x-swarm-prompt": str(number), **({} if key is None else {"idempotency-key": f"{key}.{number}"})}


def _joined(bodies: Sequence[dict[str, Any]], choices: int, listed: _Listed) -> dict[str, Any]:
    ids = [str(body.get("id")) for body in bodies]
    listed(ids[0], ids)
    return {
        **bodies[0],
        "choices": [
            _placed(choice, number, choices) for number, body in enumerate(bodies) for choice in body["choices"]
        ],
        "usage": _added([body.get("usage") or {} for body in bodies]),
    }


async def _merged(
    streams: Sequence[AsyncIterator[dict[str, Any]]], choices: int, listed: _Listed
) -> AsyncGenerator[bytes]:
    """The chunks of all streams as they come, under one id, then the sum of their usage, if there is any.

    Raises:
        SwarmGatewayError: one of them broke off.
    """
    came: asyncio.Queue[tuple[int, dict[str, Any] | Exception | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(number: int, stream: AsyncIterator[dict[str, Any]]) -> None:
        try:
            async for chunk in stream:
                await came.put((number, chunk))
            await came.put((number, None))
        except Exception as exc:
            await came.put((number, exc))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    head: dict[str, Any] = {}
    ids = [""] * len(streams)
    #: the last of each prompt: some servers count with each chunk what there is so far
    usages: dict[int, dict[str, Any]] = {}
    left = len(tasks)
    try:
        while left:
            number, chunk = await came.get()
            if isinstance(chunk, Exception):
                raise chunk
            if chunk is None:
                left -= 1
                continue
            ids[number] = ids[number] or str(chunk.get("id"))
            head = head or {key: chunk[key] for key in ("id", "created", "model") if key in chunk}
            if chunk.get("usage"):
                usages[number] = chunk["usage"]
            if chunk.get("choices"):
                placed = [_placed(choice, number, choices) for choice in chunk["choices"]]
                yield encode_event({**chunk, **head, "choices": placed})
        listed(str(head.get("id")), ids)
        if usages:
            yield encode_event({**head, "object": "text_completion", "choices": [], "usage": _added(usages.values())})
        yield DONE
    finally:
        await end_tasks(*tasks)


def _placed(choice: dict[str, Any], number: int, choices: int) -> dict[str, Any]:
    return {**choice, "index": number * choices + choice.get("index", 0)}


def _added(usages: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {name: sum(int(usage.get(name) or 0) for usage in usages) for name in _COUNTS}
    details = [usage["prompt_tokens_details"] for usage in usages if usage.get("prompt_tokens_details")]
    if details:
        total["prompt_tokens_details"] = {"cached_tokens": sum(int(part.get("cached_tokens") or 0) for part in details)}
    return total


def _trained(outcomes: Sequence[Outcome]) -> str:
    """``true`` if all were trained, ``pending`` if that is not known of all."""
    values = {outcome.headers.get("x-swarm-trained", "pending") for outcome in outcomes}
    return values.pop() if len(values) == 1 else "false" if "false" in values else "pending"
