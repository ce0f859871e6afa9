"""OpenAI Responses on the wire: request to Chat Completions form, a chat answer back to a response or its events.

Invariant: nothing is dropped in silence that has a bearing on the answer. A field of the wrong type, or one without
which the answer would be another than the one asked for, is a 400 that names it; anything else that the chat form
cannot say is left out and noted. Not even noted are hints (keys of prompt caches, tiers, labels).
Nothing is stored here: a conversation comes whole with each request, or is put together before it comes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from adapters.dialects.dialect import LLMRequest, NamedEventStream
from adapters.dialects.fields import Fields, check_depth, refuse
from adapters.dialects.response_answers import SEALED, ResponseEvents, response_of
from adapters.dialects.response_items import conversation_of, tools_of
from adapters.dialects.sse import COMMENT
from swarm.errors import CONTEXT_LENGTH, SwarmGatewayError


class ResponseStream(NamedEventStream):
    """The bytes of one streamed response."""

    def __init__(self, events: ResponseEvents) -> None:
        super().__init__(events, COMMENT)
        self._made = events

    @property
    def response(self) -> dict[str, Any]:
        """The whole response, once the stream has ended; empty before."""
        return self._made.response


class ResponsesDialect:
    """``POST /v1/responses``.

    Args:
        stored: whether responses are kept by who uses this: ``store`` is then theirs to see to, and so is
            ``previous_response_id``, whose items they have put into the ``input``.
    """

    path = "/v1/responses"

    def __init__(self, *, stored: bool = False) -> None:
        self._stored = stored

    def parse(self, data: dict[str, Any]) -> LLMRequest:
        """The internal form of a request body.

        Raises:
            RequestError: a field is missing, of the wrong type, or nothing that can be carried; ``param`` names it.
        """
        check_depth(data)
        top = Fields(data)
        previous, store = top.text("previous_response_id"), top.flag("store")
        if previous is not None and not self._stored:
            refuse("previous_response_id", "responses are not stored here; send the conversation's items as 'input'")
        if store and not self._stored:
            top.note("responses are not stored here", "store")
        model, stream = top.text("model"), top.flag("stream") or False
        body: dict[str, Any] = {"messages": conversation_of(top).messages}
        for name in ("temperature", "top_p"):
            if (value := top.number(name)) is not None:
                body[name] = value
        if (limit := top.integer("max_output_tokens")) is not None:
            body["max_completion_tokens"] = limit
        if (user := top.text("user")) is not None:
            body["user"] = user
        if (template := top.whole("chat_template_kwargs")) is not None:
            body["chat_template_kwargs"] = template
        body |= {**tools_of(top), **_text_format(top), **_reasoning(top)}
        _without_effect(top)
        top.done()
        return LLMRequest.for_one_answer(body, model, stream, top.notes.told())

    def answer(self, data: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
        """The response for a ``chat.completion``, the answer to request ``data``, whose settings it repeats.

        Raises:
            UpstreamError: it is no chat completion.
        """
        return response_of(data, completion)

    def events(self, data: Mapping[str, Any]) -> ResponseEvents:
        """Makes the events of a streamed answer to request ``data``."""
        return ResponseEvents(data)

    def stream(self, data: Mapping[str, Any]) -> ResponseStream:
        """Makes the bytes of a streamed answer to request ``data``."""
        return ResponseStream(self.events(data))

    def error(self, exc: SwarmGatewayError) -> dict[str, Any]:
        """The error body for ``exc``."""
        body = exc.body()
        return {"error": {**body["error"], "param": "input"}} if exc.code == CONTEXT_LENGTH else body


def _without_effect(top: Fields) -> None:
    """Take the fields that change no answer, and refuse those without which there would be another."""
    for name in ("conversation", "prompt"):
        top.only(name)
    top.only("background", False)
    top.only("top_logprobs", 0)
    top.whole("metadata")  # repeated in the response
    top.drop("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "client_metadata")
    # it bounds tools that do not run here
    top.drop("max_tool_calls", "stream_options")
    top.leave("truncation", "a conversation that is too long is refused", "disabled")
    include = top.take("include")
    if include is not None and not isinstance(include, list):
        refuse("include", "must be a list")
    for item in cast("list[object]", include or []):
        if item == "message.output_text.logprobs":
            refuse("include", f"{item!r} cannot be given")
        if item != SEALED:
            top.note(f"{item!s:.60} cannot be given", "include")


def _text_format(top: Fields) -> dict[str, Any]:
    text = top.inner("text")
    if text is None:
        return {}
    body: dict[str, Any] = {}
    text.leave("verbosity", "the model has no such setting", "medium")
    if (form := text.inner("format")) is not None:
        kind = form.needed("type")
        if kind == "json_schema":
            schema: dict[str, Any] = {"name": form.needed("name"), "schema": form.whole("schema") or {}}
            if (description := form.text("description")) is not None:
                schema["description"] = description
            if (strict := form.flag("strict")) is not None:
                schema["strict"] = strict
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif kind in ("text", "json_object"):
            body["response_format"] = {"type": kind}
        else:
            refuse(form.at("type"), "must be 'text', 'json_schema' or 'json_object'")
        form.done()
    text.done()
    return body


def _reasoning(top: Fields) -> dict[str, Any]:
    reasoning = top.inner("reasoning")
    if reasoning is None:
        return {}
    effort = reasoning.text("effort")
    # a summary would be another text than the one the model wrote, which the answer has
    for name in ("summary", "generate_summary"):
        reasoning.leave(name, "reasoning is given whole")
    reasoning.done()
    return {} if effort is None else {"reasoning_effort": effort}
