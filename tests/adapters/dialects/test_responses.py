"""OpenAI Responses: what is carried and what is refused, and that the events of a stream say the plain response."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.dialects import ResponsesDialect, left_out_header
from swarm.errors import NotFoundError, RequestError, UpstreamError
from tests.adapters.dialects import answers
from tests.adapters.dialects.answers import HEAD, chunks, completion, messages, sent

DIALECT = ResponsesDialect()
HI = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SEARCH = {"type": "web_search", "external_web_access": True}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SPACE = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [TOOL, PATCH]}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}


def parsed(*items: Any, **more: Any) -> dict[str, Any]:
    return DIALECT.parse({"input": list(items or [HI]), **more}).body


def test_settings_are_carried() -> None:
    tool = {
        "type": "function",
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object"},
        "strict": True,
    }
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    request = {
        "model": "m",
        "input": "hi",
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 9,
        "user": "u",
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "look"},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", **schema}},
        "reasoning": {"effort": "low"},
        "stream": True,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
    }
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object"}, "strict": True}
    assert DIALECT.parse(request).body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, HI],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 9,
        "user": "u",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": schema},
        "reasoning_effort": "low",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = DIALECT.answer(request, completion({"role": "assistant", "content": "a"}))
    assert {key: answer[key] for key in ("instructions", "tools", "temperature", "metadata")} == {
        key: request[key] for key in ("instructions", "tools", "temperature", "metadata")
    }


def test_the_end_user_and_the_session_are_carried() -> None:
    """By them a person's data is found and deleted."""
    body = parsed(user="old name", safety_identifier="Ann", metadata={"session_id": "s", "note": "n"})
    assert (body["user"], body["metadata"]) == ("Ann", {"session_id": "s"})
    assert parsed(user="Ann")["user"] == parsed(safety_identifier="Ann")["user"] == "Ann"


def test_vllms_own_fields_are_carried() -> None:
    """Without them an answer does not end at its stop text, or is of another form."""
    own = {"stop": ["END"], "seed": 1, "top_k": 5, "structured_outputs": {"choice": ["a", "b"]}, "cache_salt": "s"}
    request = DIALECT.parse({"input": "hi", **own})
    assert request.body == {"messages": [HI], **own} and request.left_out == ()


def test_items_of_one_turn_are_one_message() -> None:
    reasoning = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    text = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a", "annotations": []}],
    }
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny"}]}
    body = parsed(HI, reasoning, text, CALL, {**CALL, "call_id": "c2"}, output, {**output, "call_id": "c2"}, text)
    calls = [{"id": k, "type": "function", "function": {"name": "look", "arguments": "{}"}} for k in ("c1", "c2")]
    assert body["messages"] == [
        HI,
        {"role": "assistant", "content": "a", "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "sunny"},
        {"role": "assistant", "content": "a"},
    ]


@pytest.mark.parametrize(
    ("status", "more", "goes_on"),
    [("incomplete", [], True), ("in_progress", [], True), ("completed", [], False), ("incomplete", [HI], False)],
)
def test_an_answer_that_was_cut_goes_on(status: str, more: list[Any], goes_on: bool) -> None:
    """As by vLLM, where nothing follows it."""
    cut = {"type": "message", "role": "assistant", "id": "msg_1", "status": status, "content": "Once u"}
    body = parsed(HI, cut, *more)
    assert body["messages"][1] == {"role": "assistant", "content": "Once u"}
    assert ("continue_final_message" in body, body.get("add_generation_prompt", True)) == (goes_on, not goes_on)


def test_an_answer_that_was_cut_behind_a_call_is_not_carried_on() -> None:
    """Templates write calls last."""
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    cut = {"type": "message", "role": "assistant", "status": "incomplete", "content": "Once u"}
    assert "continue_final_message" not in parsed(HI, call, cut)
    assert parsed(input="")["messages"] == [{"role": "user", "content": ""}]
    assert parsed({"type": "web_search_call", "status": "incomplete"})["messages"] == []
    alone = {"type": "of_tomorrow", "role": "assistant", "status": "incomplete"}
    assert parsed(alone) == {"messages": []}
    assert "continue_final_message" not in parsed(HI, alone | {"output": "text"})


def test_a_developer_speaks_as_the_system() -> None:
    body = parsed({"role": "developer", "content": "b"}, HI, {"role": "developer", "content": "c"}, instructions="a")
    assert body["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hi"},
                {"type": "text", "text": "<system-reminder>\nc\n</system-reminder>"},
            ],
        },
    ]


def test_images() -> None:
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:x", "detail": "low"}]
    assert parsed({"role": "user", "content": parts})["messages"][0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
    ]


@given(messages())
def test_an_answer_given_back_is_the_message_it_was(message: dict[str, Any]) -> None:
    output = DIALECT.answer({}, completion(message))["output"]
    back = parsed(HI, *output, HI)["messages"][1:-1]
    expected = {key: value for key, value in message.items() if value or key == "content"}
    expected["content"] = expected["content"] or None
    assert back == ([expected] if output else [])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input.0"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{**CALL, "arguments": {}}]}, "input.0.arguments"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"tools": [SEARCH, TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": [{"type": "reasoning", "encrypted_content": "swarm-gateway:!"}]}, "input.0.encrypted_content"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"background": True}, "background"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"conversation": "c"}, "conversation"),
        ({"max_output_tokens": "nine"}, "max_output_tokens"),
    ],
)
def test_fields_that_cannot_be_carried_are_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        DIALECT.parse({"input": "hi", **change})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in DIALECT.error(caught.value)["error"]["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"client_metadata": {"a": "b"}, "prompt_cache_key": "k", "service_tier": "flex", "max_tool_calls": 3},
        {"stream_options": {"include_obfuscation": True}, "text": {"verbosity": "medium"}},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"input": [HI, {"type": "message", "role": "assistant", "phase": "commentary", "content": "a"}]},
        {"input": [HI, {"type": "reasoning", "summary": [], "encrypted_content": None}]},
    ],
)
def test_harmless_fields_are_accepted_without_a_note(change: dict[str, Any]) -> None:
    assert DIALECT.parse({"input": "hi", **change}).left_out == ()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"anything": 1}, "anything"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary"),
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["web_search_call.action.sources"]}, "include"),
        ({"tools": [TOOL, SEARCH], "tool_choice": "auto"}, "tools.1"),
        ({"tools": [SEARCH], "tool_choice": "auto"}, "tools.0"),
        ({"tools": [{**TOOL, "output_schema": {}}]}, "tools.0.output_schema"),
        ({"input": [HI, {"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input.1.encrypted_content"),
        ({"input": [HI, {"type": "web_search_call", "id": "ws_1", "action": {}}]}, "input.1"),
        ({"input": [HI, {"type": "compaction", "encrypted_content": "x"}]}, "input.1"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input.0.content.0"),
        ({"input": [{**HI, "name": "x"}]}, "input.0.name"),
        (
            {"input": [HI, {"role": "assistant", "content": [{"type": "input_image", "image_url": "data:,x"}]}]},
            "input.1.content.0",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "look"}, {"type": "function", "name": "nobody"}],
                },
            },
            "tool_choice.tools.1",
        ),
    ],
)
def test_fields_without_a_counterpart_are_left_out_and_noted(change: dict[str, Any], path: str) -> None:
    request = DIALECT.parse({"input": "hi", **change})
    (note,) = request.left_out
    assert note.startswith(f"{path}: ")
    assert left_out_header(request.left_out) == {"x-swarm-left-out": note}


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ({"type": "local_shell_call_output", "output": "a.txt"}, "[local_shell_call_output:]\na.txt"),
        ({"type": "mcp_call", "name": "f", "output": "sunny"}, "[mcp_call:]\nsunny"),
        ({"type": "shell_call_output", "output": [{"stdout": "a", "stderr": "b"}]}, "[shell_call_output:]\na\nb"),
        (
            {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": "data:,x"}},
            "[An item of type 'computer_call_output' was here; this model cannot read it.]",
        ),
    ],
)
def test_outputs_of_other_tools_become_a_text(item: dict[str, Any], told: str) -> None:
    request = DIALECT.parse({"input": [HI, item]})
    assert [part["text"] for part in request.messages[0]["content"]] == ["hi", told]
    assert request.left_out == (f"input.1: {item['type']} is replaced by a text",)


def test_another_makers_summary_is_replaced_by_a_text() -> None:
    """It stands for the whole conversation, which was empty without it."""
    request = DIALECT.parse({"input": [{"type": "compaction", "encrypted_content": "gAAAAA"}]})
    (turn,) = request.messages
    assert (turn["role"], turn["content"][:27]) == ("user", "[An item of type 'compactio")
    assert request.left_out == ("input.0: compaction is replaced by a text",)


def test_an_image_among_late_instructions_is_carried() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,x"}
    (turn,) = parsed(HI, {"role": "developer", "content": [image]})["messages"]
    assert [part["type"] for part in turn["content"]] == ["text", "image_url"]


def test_files_are_replaced_by_a_text() -> None:
    parts = [{"type": "input_file", "filename": "a.pdf", "file_data": "x"}, {"type": "input_image", "file_id": "f"}]
    (turn,) = parsed({"role": "user", "content": parts})["messages"]
    assert [part["text"] for part in turn["content"]] == [
        "[A file 'a.pdf' was here; this model cannot read it.]",
        "[An image was here; this model cannot read it.]",
    ]


def test_an_unknown_item_reference_is_refused_in_openais_words() -> None:
    for item in ({"type": "item_reference", "id": "rs_1"}, {"id": "rs_1"}):
        with pytest.raises(NotFoundError, match="Item with id 'rs_1' not found") as caught:
            parsed(item)
        assert (caught.value.status, caught.value.param) == (404, "input")


def test_another_models_summary_is_carried_as_reasoning() -> None:
    summary = [{"type": "summary_text", "text": text} for text in ("First.", "Then.")]
    (turn, _) = parsed({"type": "reasoning", "id": "rs", "summary": summary, "encrypted_content": "gAAA"}, HI)[
        "messages"
    ]
    assert turn == {"role": "assistant", "content": None, "reasoning": "First.\n\nThen."}


def test_messages_in_a_row_are_two_and_around_a_call_one() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    assert [turn["content"] for turn in parsed(HI, said, said)["messages"]] == ["hi", "a", "a"]
    assert [turn["content"] for turn in parsed(HI, said, CALL, said)["messages"]] == ["hi", "aa"]


def test_tools_of_a_namespace_and_of_free_input_are_functions() -> None:
    body = parsed(tools=[SPACE, PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
    functions = [tool["function"] for tool in body["tools"]]
    assert [function["name"] for function in functions] == ["agents__look", "agents__apply_patch", "apply_patch"]
    assert functions[0]["parameters"] == {"type": "object"}
    assert functions[2]["parameters"]["required"] == ["input"]
    assert functions[2]["description"] == "Edit.\n\nThe input follows this grammar:\nstart: /.+/"
    assert body["tool_choice"] == {"type": "function", "function": {"name": "apply_patch"}}


def test_an_item_may_add_tools() -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [SPACE]}
    request = DIALECT.parse({"input": [added, HI], "tools": [TOOL, SEARCH]})
    assert [tool["function"]["name"] for tool in request.body["tools"]] == [
        *("look", "agents__look", "agents__apply_patch"),
    ]
    assert request.messages == [HI]
    call = {"id": "c", "type": "function", "function": {"name": "agents__look", "arguments": "{}"}}
    (item,) = DIALECT.answer(
        {"input": [added, HI]}, completion({"role": "assistant", "content": None, "tool_calls": [call]})
    )["output"]
    assert (item["namespace"], item["name"]) == ("agents", "look")


def test_a_choice_among_some_tools_leaves_the_others_out() -> None:
    allowed = [{"type": "function", "name": "look"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    body = parsed(tools=[TOOL, PATCH, SEARCH], tool_choice=choice)
    assert [tool["function"]["name"] for tool in body["tools"]] == ["look"]
    assert body["tool_choice"] == "required"


def test_a_call_comes_out_as_the_request_names_its_tool() -> None:
    calls = [
        {"id": f"c{k}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for k, (name, arguments) in enumerate(
            [
                ("agents__look", "{}"),
                ("agents__apply_patch", '{"input": "a\\nb"}'),
                ("apply_patch", '{"a'),
                ("new", "{}"),
            ]
        )
    ]
    request = {"input": "hi", "tools": [SPACE, PATCH]}
    output = DIALECT.answer(request, completion({"role": "assistant", "content": None, "tool_calls": calls}))["output"]
    told = [{name: item[name] for name in item if name not in ("id", "status", "call_id")} for item in output]
    assert told == [
        {"type": "function_call", "name": "look", "namespace": "agents", "arguments": "{}"},
        {"type": "custom_tool_call", "name": "apply_patch", "namespace": "agents", "input": "a\nb"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": '{"a'},
        {"type": "function_call", "name": "new", "arguments": "{}"},
    ]
    outputs = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "name": item["name"], "output": "done"}
        for item in output
    ]
    _, turn, *results = parsed(HI, *output, *outputs, tools=[SPACE, PATCH])["messages"]
    assert [call["function"]["name"] for call in turn["tool_calls"]] == [call["function"]["name"] for call in calls]
    assert [result["tool_call_id"] for result in results] == ["c0", "c1", "c2", "c3"]


@given(answers.deltas(st.sampled_from(["look", "agents__look", "apply_patch", "agents__apply_patch"])))
def test_any_stream_given_back_is_what_it_said(deltas: list[dict[str, Any]]) -> None:
    request = {"input": "hi", "tools": [SPACE, TOOL, PATCH]}
    stream = DIALECT.stream(request)
    events = sent(b"".join(map(stream.take, answers.streamed(deltas))))
    (last,) = sent(stream.end())
    output = assembled([event for event in events if "output_index" in event])
    assert output == last["response"]["output"]
    back = parsed(HI, *output, HI)["messages"][1:-1]
    assert len(back) <= 1
    assert answers.joined(back, free="apply_patch") == answers.joined(deltas, free="apply_patch")


@given(st.text())
def test_thoughts_travel_in_encrypted_content_where_nothing_else_is_sent_back(thought: str) -> None:
    request = {"input": "hi", "include": ["reasoning.encrypted_content"]}
    message = {"role": "assistant", "content": "a", "reasoning": thought}
    output = DIALECT.answer(request, completion(message))["output"]
    # as Codex and the AI SDK send it back
    stripped = [
        {name: item[name] for name in item if name != "content" or item["type"] != "reasoning"} for item in output
    ]
    assert parsed(HI, *stripped)["messages"][1].get("reasoning", "") == thought


def test_a_conversation_is_compacted_by_the_model_itself() -> None:
    request = {"input": [HI, {"type": "compaction_trigger"}], "tools": [TOOL]}
    asked = DIALECT.parse(request)
    first, order = asked.messages
    assert first == HI and order["content"].startswith("Summarize this conversation")
    assert (asked.body["tool_choice"], asked.left_out) == ("none", ())
    message = {"role": "assistant", "content": "They said hi.", "reasoning": "Well"}
    thought, summary = DIALECT.answer(request, completion(message))["output"]
    assert (thought["type"], summary.keys()) == ("reasoning", {"id", "type", "encrypted_content"})
    _, turn, now = parsed(HI, summary, {"role": "user", "content": "And now?"})["messages"]
    assert (turn["role"], now["content"]) == ("user", "And now?")
    assert turn["content"].endswith("They said hi.")
    # the answer of another gateway, and that of OpenAI, which is none that a hook could compare
    response = DIALECT.answer(request, completion(message))
    assert DIALECT.read(response).message == message
    response["output"][-1]["encrypted_content"] = "gAAAAA"
    with pytest.raises(UpstreamError, match="only its maker can read its summary"):
        DIALECT.read(response)
    # one that it made on its way to an answer
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]}
    assert DIALECT.read({**response, "output": [response["output"][-1], text]}).text == "Hello"
    # the trigger of an earlier request asks for nothing
    assert parsed({"type": "compaction_trigger"}, HI)["messages"] == [HI]


def test_a_streamed_summary_is_sealed_a_few_times_whatever_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def sealed(text: str) -> str:
        made.append(text)
        return text

    monkeypatch.setattr("adapters.dialects.responses.sealed", sealed)
    stream = DIALECT.stream({"input": [HI, {"type": "compaction_trigger"}]})
    for _ in range(100):
        events = sent(stream.take({**HEAD, "choices": [{"index": 0, "delta": {"content": "a"}}]}))
        assert "compaction" not in str(events)
    stream.take({**HEAD, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    stream.end()
    assert made == ["a" * 100] * 2


@pytest.mark.parametrize(
    ("finish", "status", "why"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
    ],
)
def test_statuses_and_usage(finish: str, status: str, why: Any) -> None:
    response = DIALECT.answer({}, completion({"role": "assistant", "content": "a"}, finish))
    assert (response["status"], response["incomplete_details"]) == (status, why)
    assert response["output"][-1]["status"] == status
    assert (response["id"], response["model"], response["created_at"]) == ("resp_7", "tiny", 5)
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 0}
    assert [response["usage"][key] for key in ("input_tokens", "output_tokens", "total_tokens")] == [4, 2, 6]


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client puts together from the deltas alone; asserts that what is "done" says the same."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append({**event["item"]})
        elif kind == "content_part.added":
            items[-1]["content"] = [{**event["part"]}]
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[-1]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "custom_tool_call_input.delta":
            items[-1]["input"] += event["delta"]
        elif kind == "custom_tool_call_input.done":
            assert event["input"] == items[-1]["input"]
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == items[-1]["content"][0]["text"]
        elif kind == "function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (items[-1]["arguments"], items[-1]["name"])
        elif kind == "content_part.done":
            assert event["part"] == items[-1]["content"][0]
        else:
            assert kind == "output_item.done"
            items[-1] |= {name: value for name, value in event["item"].items() if name == "status"}
            assert items[-1] == event["item"]
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
        assert event["output_index"] == len(items) - 1
    return items


@given(
    st.data(),
    messages(),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.sampled_from(["hi", [HI, {"type": "compaction_trigger"}]]),
)
def test_any_stream_says_the_plain_response(
    data: st.DataObject, message: dict[str, Any], finish: str, asked: Any
) -> None:
    request = {"input": asked, "temperature": 0.5}
    stream = DIALECT.stream(request)
    events = sent(b"".join(map(stream.take, data.draw(chunks(message, finish)))))
    created, in_progress, *middle = events
    (last,) = sent(stream.end())
    plain = DIALECT.answer(request, completion(message, finish))
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["status"] == "in_progress" and created["response"]["output"] == []
    assert assembled(middle) == plain["output"]
    assert (last["type"], last["response"]) == (f"response.{plain['status']}", plain)
    assert [event["sequence_number"] for event in [*events, last]] == list(range(len(events) + 1))


def test_a_stream_has_the_id_of_its_first_chunk_also_where_that_has_no_choice() -> None:
    stream = DIALECT.stream({})
    created, *_ = sent(stream.take({**HEAD, "choices": [], "prompt_filter_results": []}))
    plain = DIALECT.answer({}, completion({"role": "assistant", "content": "a"}, "stop"))
    assert [created["response"][name] for name in ("id", "created_at", "model")] == [
        plain[name] for name in ("id", "created_at", "model")
    ]


def test_a_stream_that_fails_says_so() -> None:
    stream = DIALECT.stream({})
    stream.take({**HEAD, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
    with pytest.raises(UpstreamError, match="no end"):
        stream.end()
    (event,) = sent(stream.fail(UpstreamError("cut")))
    assert (event["type"], event["response"]["error"]["message"]) == ("response.failed", "cut")
    assert event["response"]["status"] == "failed"
    assert event["response"]["output"][0]["status"] == "incomplete"
