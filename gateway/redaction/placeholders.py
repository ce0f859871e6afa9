"""``redact: before_sampling``: a request with placeholders for what is private, and its outcome with the values.

Invariant: nothing behind :func:`masked` sees a value, and nobody but the user sees one behind :func:`filled`. Names by
which a session or a user is known are no texts: of a user's name that is private there is a digest, as on the disk.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from adapters.dialects import to_json
from adapters.dialects.jsons import object_in
from adapters.dialects.sse import DONE, SseDecoder, encode_event
from gateway.redaction.masking import ALL_JSON, CALLS, Masking, Unmasking, unmasked
from gateway.redaction.rules import Rules
from gateway.types import Decided, Incoming, Live, Outcome, Relayed
from swarm.subjects import user_digest

Chunk = dict[str, Any]

_USERS = ("user", "safety_identifier")
#: Of a ``response_format`` whose answers are JSON.
_JSON_FORMS = ("json_object", "json_schema")


def masked(incoming: Incoming) -> Incoming:
    """The request as it is to be sampled, by the rules of its consent."""
    rules, call = cast("Rules | None", incoming.consent.rules), incoming.call
    if rules is None or not rules.private(call.body):
        return incoming
    masking, body = Masking(rules), call.body
    # the conversation last: what is private in it may grow, and the numbers of the rest stay
    rest = {name: value for name, value in body.items() if name not in ("model", "messages", *_USERS)}
    parts: list[Any] = [rest, call.messages]
    masked_rest, messages = masking.masked(parts)
    body = {**body, **masked_rest, **_named(body, masked_rest.get("metadata"), rules)}
    if "messages" in body:
        body["messages"] = messages
    return replace(incoming, call=replace(call, body=body, messages=messages), values=masking.values)


def filled(outcome: Outcome, incoming: Incoming) -> Outcome:
    """``outcome`` of ``incoming`` with its values in place of their placeholders."""
    values, form = incoming.values, cast("Any", incoming.call.body.get("response_format"))
    fields = ALL_JSON if isinstance(form, dict) and form.get("type") in _JSON_FORMS else CALLS
    unmasking = Unmasking(values, fields)
    match outcome:
        case Decided(chunks=chunks):
            completion = unmasked(outcome.completion, values, fields)
            return replace(outcome, completion=completion, chunks=lambda: _whole(chunks(), Unmasking(values, fields)))
        case Live():
            return replace(outcome, chunks=_live(outcome.chunks, unmasking))
        case Relayed(body=body):
            if not isinstance(body, bytes):
                return replace(outcome, body=_relayed(body, unmasking))
            answer = object_in(body)
            return outcome if answer is None else replace(outcome, body=to_json(unmasked(answer, values, fields)))


def _named(body: Mapping[str, Any], masked_metadata: Any, rules: Rules) -> dict[str, Any]:
    """The names by which the application knows a user or a session, and which it must know again."""
    names = {name: _name(body[name], rules) for name in _USERS if name in body}
    metadata: Any = body.get("metadata")
    if isinstance(metadata, dict) and "session_id" in metadata:
        named = cast("dict[str, Any]", metadata)
        names["metadata"] = {**masked_metadata, "session_id": _name(named["session_id"], rules)}
    return names


def _name(name: Any, rules: Rules) -> Any:
    return user_digest(name) if isinstance(name, str) and rules.private(name) else name


def _whole(chunks: Any, unmasking: Unmasking) -> Iterator[Chunk]:
    for chunk in chunks:
        yield from unmasking.take(chunk)
    yield from unmasking.end()


async def _live(chunks: AsyncIterator[Chunk], unmasking: Unmasking) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        for part in unmasking.take(chunk):
            yield part
    for part in unmasking.end():
        yield part


async def _relayed(body: AsyncIterator[bytes], unmasking: Unmasking) -> AsyncIterator[bytes]:
    """The events of an upstream that speaks the dialect itself: chats, or raw completions; cut off where they are."""
    decoder, is_whole = SseDecoder(), False
    async for part in body:
        for event in decoder.feed(part):
            is_whole = is_whole or event == "[DONE]"
            if (chunk := object_in(event)) is not None:
                for unmasked_chunk in unmasking.take(chunk):
                    yield encode_event(unmasked_chunk)
    for rest in unmasking.end():
        yield encode_event(rest)
    if is_whole:
        yield DONE
