"""Anthropic Messages: what is carried and what is refused, and that the events of a stream say the plain message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.dialects import MessagesDialect, left_out_header
from swarm.errors import (
    AuthenticationError,
    ConflictError,
    NotFoundError,
    OverloadedError,
    RelayedError,
    RequestError,
    UnavailableError,
    UpstreamError,
)
from tests.adapters.dialects import answers
from tests.adapters.dialects.answers import HEAD, chunks, completion, messages, sent

DIALECT = MessagesDialect()
HI: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}


def parsed(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return DIALECT.parse({"max_tokens": 9, "messages": list(turns or [HI]), **more}).body


def said(*blocks: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    """The chat messages of one turn after a first one."""
    return parsed(HI, {"role": role, "content": list(blocks)}, HI)["messages"][1:-1]


def test_settings_are_carried() -> None:
    body = parsed(
        model="m",
        system="Be brief.",
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        cache_salt="s",
        stop_sequences=["END"],
        metadata={"user_id": "u"},
        stream=True,
        service_tier="auto",
        thinking={"type": "enabled", "budget_tokens": 5},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, HI],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "cache_salt": "s",
        "stop": ["END"],
        "user": "u",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
        },
    }


@pytest.mark.parametrize(
    ("choice", "carried"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "look"}, {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
    ],
)
def test_tools(choice: dict[str, Any], carried: dict[str, Any]) -> None:
    function = {"name": "look", "parameters": {"type": "object"}, "description": "Look."}
    body = parsed(tools=[TOOL], tool_choice=choice)
    assert body.pop("tools") == [{"type": "function", "function": function}]
    assert body == {"messages": [HI], "max_tokens": 9, **carried}


def test_an_assistants_last_words_are_continued() -> None:
    body = parsed(HI, {"role": "assistant", "content": "It is"})
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in parsed()


@given(messages())
def test_an_answer_given_back_is_the_message_it_was(message: dict[str, Any]) -> None:
    turn = DIALECT.answer({}, completion(message))
    (back,) = said(*turn["content"], role="assistant")
    assert back["content"] == (message["content"] or (None if message["tool_calls"] else ""))
    assert back.get("reasoning") == (message["reasoning"] or None)
    calls = back.get("tool_calls", [])
    for mine, theirs in zip(calls, message["tool_calls"], strict=True):
        assert json.loads(mine["function"].pop("arguments")) == json.loads(theirs["function"]["arguments"])
        assert mine == {**theirs, "function": {"name": theirs["function"]["name"]}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0.source"),
        ({"messages": [HI, {"role": "assistant", "content": [USE]}]}, "messages.1"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.source"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"stream": "perhaps"}, "stream"),
        ({"temperature": "hot"}, "temperature"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice.type"),
    ],
)
def test_fields_that_cannot_be_carried_are_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        DIALECT.parse({"max_tokens": 9, "messages": [HI], **change})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"user_id": "u", "app": 1}},
        {"service_tier": "priority", "inference_geo": "us", "betas": ["x"]},
        {"thread": {"type": "create"}},
        {"speed": "standard", "container": None, "mcp_servers": [], "context_management": None},
        {"thinking": {"type": "adaptive", "display": "summarized"}},
        {"tools": [{**TOOL, "eager_input_streaming": True, "defer_loading": True, "allowed_callers": ["direct"]}]},
        {"tools": [], "tool_choice": {"type": "auto"}},
        {"messages": [HI, {"role": "assistant", "content": ""}]},
        {"messages": [{"role": "user", "content": []}]},
        {
            "messages": [
                HI,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": "E"}]},
                HI,
            ]
        },
    ],
)
def test_harmless_fields_are_accepted_without_a_note(change: dict[str, Any]) -> None:
    assert DIALECT.parse({"max_tokens": 9, "messages": [HI], **change}).left_out == ()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"diagnostics": {"previous": 1}}, "diagnostics"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
        ({"speed": "fast"}, "speed"),
        ({"messages": [{**HI, "name": "x"}]}, "messages.0.name"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
        ({"tools": [TOOL, SEARCH]}, "tools.1"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "auto"}}, "tools.0"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools.0.input_examples"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "tools.0.allowed_callers"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "messages.0.content.0.x",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]}, "messages.0.content.0"),
    ],
)
def test_fields_without_a_counterpart_are_left_out_and_noted(change: dict[str, Any], path: str) -> None:
    request = DIALECT.parse({"max_tokens": 9, "messages": [HI], **change})
    (note,) = request.left_out
    assert note.startswith(f"{path}: ")
    assert left_out_header(request.left_out) == {"x-swarm-left-out": note}


def test_tools_of_anthropic_are_left_out_beside_others() -> None:
    body = parsed(tools=[SEARCH, TOOL, {"type": "bash_20250124", "name": "bash"}], tool_choice={"type": "any"})
    assert [tool["function"]["name"] for tool in body["tools"]] == ["look"]
    assert body["tool_choice"] == "required"
    # vLLM refuses an empty list of tools, and a choice among none
    assert not {"tools", "tool_choice"} & parsed(tools=[SEARCH], tool_choice={"type": "auto"}).keys()


def test_messages_add_replace_and_remove_tools() -> None:
    def change(kind: str, **tool: Any) -> dict[str, Any]:
        return {"role": "system", "content": [{"type": kind, "tool": tool}]}

    def offered(*changes: dict[str, Any]) -> list[Any]:
        request = DIALECT.parse({"max_tokens": 9, "messages": [HI, *changes], "tools": [TOOL]})
        assert request.left_out == ()
        return [
            (tool["function"]["name"], tool["function"].get("description")) for tool in request.body.get("tools", ())
        ]

    first = (TOOL["name"], TOOL.get("description"))
    ask = {"name": "ask", "description": "a", "input_schema": {"type": "object"}}
    add = change("tool_addition", type="tool_definition", definition=ask)
    drop = change("tool_removal", type="tool_reference", name=TOOL["name"])
    assert offered(add) == [first, ("ask", "a")]
    other = change("tool_addition", type="tool_definition", definition={**ask, "description": "b"})
    assert offered(add, other) == [first, ("ask", "b")]
    assert offered(add, drop) == [("ask", "a")]
    assert offered(drop, change("tool_addition", type="tool_reference", name=TOOL["name"])) == [first]
    # of two with one name, neither is lost
    assert len(parsed(HI, tools=[TOOL, {**TOOL, "description": "b"}])["tools"]) == 2
    search = parsed(HI, change("tool_addition", type="tool_definition", definition=SEARCH))
    assert "can be called" not in str(search["messages"]) and "tools" not in search
    told = parsed(HI, add, drop)["messages"][0]["content"]
    assert "[The tool 'ask' can be called now.]" in told[1]["text"]
    assert f"[The tool '{TOOL['name']}' cannot be called any more.]" in told[2]["text"]


def test_notes_are_short_and_printable() -> None:
    unknown = {f"\r\nx-evil: {k}; \u20ac" * 99: 1 for k in range(99)}
    turns = [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}] * 5
    request = DIALECT.parse({"max_tokens": 9, "messages": turns, **unknown})
    (told,) = left_out_header(request.left_out).values()
    assert len(told) <= 1000 and told.isascii() and told.isprintable()
    assert request.left_out[0].startswith("messages.*.content.0.x: ") or "*" in request.left_out[0]
    assert (len(request.left_out), request.left_out[-1]) == (21, "and 80 more")


def test_thinking_has_a_signature_without_which_clients_keep_it_to_themselves() -> None:
    message = {"role": "assistant", "content": "a", "reasoning": "hm", "tool_calls": []}
    thinking, text = DIALECT.answer({}, completion(message))["content"]
    assert (thinking["signature"], "signature" in text) == ("swarm-gateway", False)
    assert said(thinking, text, role="assistant") == [{"role": "assistant", "content": "a", "reasoning": "hm"}]


@given(answers.deltas())
def test_any_stream_given_back_is_what_it_said(deltas: list[dict[str, Any]]) -> None:
    stream = DIALECT.stream({})
    turn = assembled(sent(b"".join(map(stream.take, answers.streamed(deltas))) + stream.end()))
    (back,) = said(*turn["content"], role="assistant")
    assert answers.joined([back]) == answers.joined(deltas)


@pytest.mark.parametrize("messages", [[HI], []])
def test_a_thread_that_goes_on_is_not_found(messages: list[Any]) -> None:
    goes_on = {"type": "continue", "previous_message_id": "msg_1"}
    with pytest.raises(NotFoundError) as caught:
        DIALECT.parse({"max_tokens": 9, "messages": messages, "thread": goes_on})
    error = DIALECT.error(caught.value)["error"]
    assert (error["type"], error["details"]) == ("not_found_error", {"error_code": "thread_not_found"})


def test_any_turn_can_be_counted() -> None:
    turns = [HI, {"role": "assistant", "content": [USE]}]
    counted = DIALECT.counted({"model": "m", "messages": turns, "tools": [SEARCH], "context_management": {"edits": []}})
    assert counted.keys() == {"model", "messages", "add_generation_prompt"}
    assert counted["add_generation_prompt"] is False
    counted = DIALECT.counted({"messages": [HI, {"role": "assistant", "content": "It is"}]})
    assert (counted["add_generation_prompt"], counted["continue_final_message"]) == (False, True)


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", None, "end_turn"),
        ("stop", 151645, "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("tool_calls", None, "tool_use"),
        ("content_filter", None, "refusal"),
    ],
)
def test_stop_reasons(finish: str, stop: int | str | None, reason: str) -> None:
    message = DIALECT.answer({}, completion({"role": "assistant", "content": "a"}, finish, stop))
    assert message["stop_reason"] == reason
    assert message["stop_sequence"] == (stop if reason == "stop_sequence" else None)
    assert message["usage"] == {"input_tokens": 1, "cache_read_input_tokens": 3, "output_tokens": 2}
    assert (message["id"], message["model"]) == ("msg_7", "tiny")


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        *((bad, {"INVALID_JSON": bad}) for bad in ('{"a', "[1]", '{"a": NaN}', r'{"a": "\ud800"}')),
    ],
)
def test_a_forced_call_and_its_arguments(arguments: str, given: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = DIALECT.answer({}, completion({"role": "assistant", "content": None, "tool_calls": [call]}))
    assert message["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": given}]
    assert message["stop_reason"] == "tool_use"
    stream = DIALECT.stream({})
    stream.foresee({})
    deltas = [{"tool_calls": [{**call, "index": 0, "function": {"name": "f", "arguments": ""}}]}]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": character}}]} for character in arguments]
    events = sent(b"".join(map(stream.take, answers.streamed(deltas))) + stream.end())
    assert assembled(events)["content"] == message["content"], "SDKs fail at arguments that are no JSON"


def read(arguments: str) -> Any:
    """As a client reads them that keeps what it cannot read."""
    try:
        value = json.loads(arguments)
        json.dumps(value, allow_nan=False)
    except ValueError:
        return arguments
    return value


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that an SDK puts together; asserts the order of events."""
    start, ping, *middle, delta, stop = events
    assert (start["type"], ping["type"]) == ("message_start", "ping")
    assert (delta["type"], stop["type"]) == ("message_delta", "message_stop")
    message = start["message"]
    blocks = message["content"]
    is_open, arguments = False, ""
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            is_open, arguments = True, ""
            continue
        assert is_open and event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            if arguments:
                blocks[-1]["input"] = read(arguments)
        elif event["delta"]["type"] == "input_json_delta":
            arguments += event["delta"]["partial_json"]
        else:
            key = event["delta"]["type"].removesuffix("_delta")
            blocks[-1][key] += event["delta"][key]
    assert not is_open
    return message | delta["delta"] | {"usage": delta["usage"]}


@given(st.data(), messages(), st.sampled_from(["stop", "length", "tool_calls"]), st.sampled_from([None, 7, "END"]))
def test_any_stream_says_the_plain_message(
    data: st.DataObject, message: dict[str, Any], finish: str, stop: int | str | None
) -> None:
    stream = DIALECT.stream({})
    events = sent(b"".join(map(stream.take, data.draw(chunks(message, finish, stop)))))
    assert not {"message_delta", "message_stop"} & {event["type"] for event in events}
    assert assembled([*events, *sent(stream.end())]) == DIALECT.answer({}, completion(message, finish, stop))


def test_words_in_the_middle_of_a_call_wait_for_its_end() -> None:
    """vLLM's parsers send the line between two calls late, when the second has begun."""
    first, second = (
        {"index": index, "id": f"call-{index}", "type": "function", "function": {"name": "f", "arguments": ""}}
        for index in range(2)
    )
    more = [{"index": index, "function": {"arguments": '{"a": 1}'}} for index in range(2)]
    deltas: list[dict[str, Any]] = [{"content": "Both."}, {"tool_calls": [first]}, {"tool_calls": [more[0]]}]
    deltas += [{"tool_calls": [second]}, {"content": "\n"}, {"content": "x", "tool_calls": [more[1]]}]
    stream = DIALECT.stream({})
    turn = assembled(sent(b"".join(map(stream.take, answers.streamed(deltas))) + stream.end()))
    text, *calls, rest = turn["content"]
    assert (text["text"], rest["text"], [call["input"] for call in calls]) == ("Both.", "\nx", [{"a": 1}, {"a": 1}])


@pytest.mark.parametrize("content", [None, ""])
def test_an_empty_answer_has_a_text(content: str | None) -> None:
    """As vLLM's has: programs read the first block."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    answer = DIALECT.answer({}, completion(message))
    assert answer["content"] == [{"type": "text", "text": ""}]
    stream = DIALECT.stream({})
    events = sent(b"".join(map(stream.take, answers.streamed([message]))) + stream.end())
    assert assembled(events)["content"] == answer["content"]


def test_a_message_has_the_id_of_the_chunk_that_says_something() -> None:
    """Azure's first chunk tells what its filters found, and has neither id nor model."""
    message: dict[str, Any] = {"role": "assistant", "content": "a"}
    filters = {"id": "", "created": 0, "model": "", "choices": [], "prompt_filter_results": []}
    stream = DIALECT.stream({})
    events = sent(b"".join(map(stream.take, [filters, *answers.streamed([message])])) + stream.end())
    whole = assembled(events)
    assert (whole["id"], whole["model"]) == ("msg_7", "tiny")


def test_the_prompts_tokens_are_counted_by_what_the_cache_did() -> None:
    """As by vLLM: clients add them up."""
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4, "created_cache_tokens": 3}}
    body = {**completion({"role": "assistant", "content": "a"}), "usage": {**usage, "completion_tokens": 1}}
    told = {"cache_read_input_tokens": 4, "cache_creation_input_tokens": 3}
    assert DIALECT.answer({}, body)["usage"] == {"input_tokens": 2, "output_tokens": 1, **told}


def test_a_message_that_is_live_begins_with_the_tokens_of_its_prompt() -> None:
    """As vLLM's: some programs read them nowhere else."""
    opening, *_ = answers.streamed([{"role": "assistant", "content": "a"}])
    usage = {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
    start, *_ = sent(DIALECT.stream({}).take({**opening, "usage": usage}))
    assert start["message"]["usage"] == {"input_tokens": 5, "output_tokens": 0}


def test_a_stream_without_an_end_is_no_answer() -> None:
    stream = DIALECT.stream({})
    stream.take({**HEAD, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
    with pytest.raises(UpstreamError, match="no end"):
        stream.end()


def test_a_call_without_a_name_is_no_answer() -> None:
    delta = {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}
    with pytest.raises(UpstreamError, match="without a name"):
        DIALECT.stream({}).take({**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


@pytest.mark.parametrize(
    ("exc", "kind"),
    [
        (RequestError("x", param="p"), "invalid_request_error"),
        (ConflictError("x"), "invalid_request_error"),
        (AuthenticationError("x"), "authentication_error"),
        (OverloadedError("x"), "rate_limit_error"),
        (UnavailableError("x"), "overloaded_error"),
        (UpstreamError("x"), "api_error"),
        (RelayedError(400, {"message": "x", "type": "BadRequestError"}), "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_shape(exc: Any, kind: str) -> None:
    body = DIALECT.error(exc)
    assert body["type"] == "error"
    assert (body["error"]["type"], body["error"]["message"]) == (kind, "x")
    assert body["error"]["param"] == exc.param
    assert sent(DIALECT.stream({}).fail(exc)) == [body]
