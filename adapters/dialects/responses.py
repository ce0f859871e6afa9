"""OpenAI Responses on the wire: request to Chat Completions form, a chat answer back to a response or its events.

Invariant: nothing that affects the answer is dropped silently. A field of the wrong type, or one whose absence would
change the answer, is a 400 that names it; anything else that the chat form cannot express is left out and noted. Hints
(keys of prompt caches, tiers, labels) are not even noted. Nothing is stored here: a conversation comes whole with each
request, or is completed before it comes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from adapters.dialects.chat_answers import parts_of
from adapters.dialects.dialect import Body, Dialect, LLMRequest, SampledAnswer, choices_of, unreadable
from adapters.dialects.fields import Fields, check_depth, present, refuse, session_in
from adapters.dialects.response_answers import CUT, ID_PREFIX, SEALED, ResponseItems, ResponseStream
from adapters.dialects.response_items import conversation_of, tools_of
from swarm.errors import CONTEXT_LENGTH, SwarmGatewayError

_FINISH_REASONS = {reason: finish for finish, reason in CUT.items()}


class ResponsesDialect(Dialect):
    """``POST /v1/responses``.

    Args:
        stored: whether the caller stores responses. It then handles ``store`` and ``previous_response_id``, and adds
            the items of the latter to ``input``.
    """

    path = "/v1/responses"
    id_prefix = ID_PREFIX
    translatable = True
    spelled = {"max_completion_tokens": "max_output_tokens"}

    def __init__(self, *, stored: bool = False) -> None:
        self._stored = stored

    def parse(self, data: dict[str, Any]) -> LLMRequest:
        check_depth(data)
        top = Fields(data)
        previous, store = top.text("previous_response_id"), top.flag("store")
        if previous is not None and not self._stored:
            refuse("previous_response_id", "responses are not stored here; send the conversation's items as 'input'")
        if store and not self._stored:
            top.note("responses are not stored here", "store")
        model, stream = top.text("model"), top.flag("stream") or False
        user, known_as = top.text("user"), top.text("safety_identifier")
        body: dict[str, Any] = {"messages": conversation_of(top).messages} | present(
            temperature=top.number("temperature"),
            top_p=top.number("top_p"),
            max_completion_tokens=top.integer("max_output_tokens"),
            user=known_as or user,
            # the response repeats it; the name of its session alone goes on
            metadata=session_in(top.whole("metadata")),
            chat_template_kwargs=top.whole("chat_template_kwargs"),
        )
        body |= {**tools_of(top), **_text_format(top), **_reasoning(top)}
        _without_effect(top)
        top.done()
        return LLMRequest.for_one_answer(body, model, stream, top.notes.lines())

    def answer(self, data: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
        choice, usage = choices_of(completion)[0], completion.get("usage") or {}
        return ResponseItems(data, completion).ended(parts_of(choice["message"]), choice.get("finish_reason"), usage)

    def stream(self, data: Mapping[str, Any]) -> ResponseStream:
        return ResponseStream(data)

    def read(self, body: Body) -> SampledAnswer:
        output: list[Body] = body["output"]
        turns = self.parse({"model": "any", "input": output}).messages if output else []
        match body.get("status"):
            case "completed":
                finish = "tool_calls" if turns and turns[-1].get("tool_calls") else "stop"
            case "incomplete":
                reason = str((body.get("incomplete_details") or {}).get("reason"))
                finish = _FINISH_REASONS.get(reason) or reason
            case status:
                raise unreadable(f"its status is {status}")
        return SampledAnswer.from_turns(body, turns, finish)

    def read_stream(self, events: Iterable[Body]) -> SampledAnswer:
        ends = [event for event in events if event.get("type") in ("response.completed", "response.incomplete")]
        if not ends:
            raise unreadable("the stream broke off")
        return self.read(ends[-1]["response"])

    def error(self, exc: SwarmGatewayError) -> dict[str, Any]:
        body = exc.body()
        return {"error": {**body["error"], "param": "input"}} if exc.code == CONTEXT_LENGTH else body


def _without_effect(top: Fields) -> None:
    """Take the fields that do not affect the answer, and refuse those that would."""
    for name in ("conversation", "prompt"):
        top.only(name)
    top.only("background", False)
    top.only("top_logprobs", 0)
    top.drop("prompt_cache_key", "prompt_cache_retention", "service_tier", "client_metadata")
    # the first bounds tools that do not run here
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
        kind = form.required("type")
        if kind == "json_schema":
            schema: dict[str, Any] = {"name": form.required("name"), "schema": form.whole("schema") or {}}
            schema |= present(description=form.text("description"), strict=form.flag("strict"))
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
    # the answer has the reasoning itself
    for name in ("summary", "generate_summary"):
        reasoning.leave(name, "reasoning is given whole")
    reasoning.done()
    return present(reasoning_effort=effort)
