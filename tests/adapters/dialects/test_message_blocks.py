"""Turns and blocks of Anthropic's in the chat form: whatever stands in a conversation, the session goes on."""

from __future__ import annotations

from typing import Any

import pytest

from adapters.dialects import MessagesDialect
from tests.adapters.dialects import answers
from tests.adapters.dialects.test_messages import HI, USE, parsed, said

DIALECT = MessagesDialect()


def test_system_blocks_stay_apart() -> None:
    blocks = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("a", "b")]
    assert parsed(system=blocks)["messages"][0] == {
        "role": "system",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }


def test_images() -> None:
    inline = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    assert said({"type": "text", "text": "see"}, inline, linked) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
                {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
            ],
        }
    ]


def test_results_of_tools_come_first_and_tell_of_failures() -> None:
    assert said(
        {"type": "tool_result", "tool_use_id": "1", "content": "sunny"},
        {"type": "tool_result", "tool_use_id": "2", "is_error": True, "content": [{"type": "text", "text": "gone"}]},
        {"type": "tool_result", "tool_use_id": "3"},
        {"type": "text", "text": "and now?"},
    ) == [
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {
            "role": "tool",
            "tool_call_id": "2",
            "content": [{"type": "text", "text": "Error: "}, {"type": "text", "text": "gone"}],
        },
        {"role": "tool", "tool_call_id": "3", "content": ""},
        {"role": "user", "content": "and now?"},
    ]


@pytest.mark.parametrize(
    ("given", "carried"),
    [
        ("{", {"INVALID_JSON": "{"}),
        ([1], {"INVALID_JSON": "[1]"}),
        (None, {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": "é"}, {"a": "é"}),
        ({"a": "\ud800"}, {"INVALID_JSON": r'{"a": "\ud800"}'}),
    ],
)
def test_unreadable_arguments_are_accepted_back(given: Any, carried: Any) -> None:
    (turn,) = said({**USE, "input": given}, role="assistant")
    assert answers.meant(turn["tool_calls"][0]["function"]["arguments"]) == carried


def test_late_instructions_become_part_of_a_user_message() -> None:
    turns = [HI, {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "a"}]
    reminder = "<system-reminder>\nBe brief.\n</system-reminder>"
    told = [{"type": "text", "text": "hi"}, {"type": "text", "text": reminder}]
    assert parsed(*turns, HI)["messages"][:2] == [{"role": "user", "content": told}, turns[2]]
    blocks = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert parsed(HI, turns[2], blocks, HI)["messages"][2:] == [{"role": "user", "content": told[::-1]}]
    assert parsed(HI, turns[2], blocks)["messages"][2:] == [{"role": "user", "content": reminder}]
    assert parsed(blocks, HI, system="You.")["messages"][0] == {
        "role": "system",
        "content": [{"type": "text", "text": "You."}, {"type": "text", "text": "Be brief."}],
    }


def test_an_assistants_server_tools_are_left_out() -> None:
    turn = [
        {"type": "thinking", "thinking": "hm", "signature": "Ex"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "It is ", "citations": [{}]},
        {"type": "text", "text": "sunny."},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}, "caller": {"type": "code_execution_20250825"}},
    ]
    request = DIALECT.parse({"max_tokens": 9, "messages": [HI, {"role": "assistant", "content": turn}, HI]})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert request.messages[1] == {
        "role": "assistant",
        "reasoning": "hm",
        "content": "It is sunny.",
        "tool_calls": [call],
    }
    assert [note.partition(":")[0] for note in request.left_out] == [
        *(f"messages.1.content.{k}" for k in (1, 2, 3)),
        "messages.1.content.4.citations",
        "messages.1.content.6.caller",
    ]


def test_documents_are_carried_as_far_as_they_are_text() -> None:
    text = {"type": "text", "media_type": "text/plain", "data": "Once."}
    parts = {"type": "content", "content": [{"type": "text", "text": "upon"}]}
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
    found = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "a time"}]}
    (turn,) = said(
        {"type": "document", "title": "T", "source": text},
        {"type": "document", "source": parts, "citations": {"enabled": False}},
        {"type": "document", "title": "a.pdf", "source": pdf},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        found,
    )
    assert [part["text"] for part in turn["content"]] == [
        *("T", "Once.", "upon"),
        "[A PDF document 'a.pdf' was here; this model cannot read it.]",
        "[An image was here; this model cannot read it.]",
        "t (s)\na time",
    ]
    (result,) = said({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "document", "source": pdf}]})
    assert result["content"] == "[A PDF document was here; this model cannot read it.]"


def test_results_of_tools_go_before_what_the_user_says() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
    assert said({"type": "text", "text": "a"}, result, {"type": "text", "text": "b"}) == [
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
