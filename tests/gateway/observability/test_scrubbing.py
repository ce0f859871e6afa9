"""What counts as a secret, and what must not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from adapters.dialects.response_items import sealed
from gateway.observability.scrubbing import readable_body, text_without_secrets, without_credentials, without_secrets


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-abcdefghijklmnop0123",
        "sk-swarm-0123456789ab-AbCdEfGhIjKl_-mnop",
        "sk-ant-api03-abcdefghijklmnop",
        "hf_abcdefghijklmnopqrst",
        "ghp_abcdefghijklmnopqrst",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def_ghi",
        sealed("my key is sk-proj-abcdefghijklmnop0123"),
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_secret_is_known_by_its_form(secret: str) -> None:
    told = text_without_secrets(f"my key is {secret}, keep it")
    assert told == "my key is [removed], keep it"


def test_a_secret_is_known_behind_an_escape_of_json() -> None:
    """The arguments of a call are JSON within a text, and so is what is left of a body that is cut."""
    arguments = json.dumps(
        {"content": "key:\nsk-proj-abcdefghijklmnop0123\n\teyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc"}
    )
    body = json.dumps({"arguments": arguments, "more": "x" * 300}).encode()
    for told in (readable_body(body), readable_body(body, cut=True), readable_body(b"data: " + body)):
        text = json.dumps(told)
        assert "sk-" not in text and "eyJ" not in text and text.count("[removed]") == 2, text


@pytest.mark.parametrize(
    "text",
    [
        "ask-me-anything-about-everything-you-know",
        "the task is risk-averse",
        "https://example.com:8000/v1?a=b@c",
        "a bearer of news",
        "12:30 meet@example.com",
    ],
)
def test_plain_words_stay(text: str) -> None:
    assert text_without_secrets(text) == text


def test_a_secret_is_known_by_its_field() -> None:
    given: dict[str, Any] = {
        "tools": [{"type": "mcp", "authorization": "short", "headers": {"X-Api-Key": "k"}}],
        "refresh_token": "t",
        "max_tokens": 5,
        "logprobs": {"content": [{"token": "secret", "logprob": -0.1}]},
    }
    assert without_secrets(given) == {
        "tools": [{"type": "mcp", "authorization": "[removed]", "headers": {"X-Api-Key": "[removed]"}}],
        "refresh_token": "[removed]",
        "max_tokens": 5,
        "logprobs": {"content": [{"token": "secret", "logprob": -0.1}]},
    }


def test_a_secret_is_known_by_its_field_where_the_body_is_no_whole_json() -> None:
    """A long body is cut, a stream is events, and the arguments of a call are JSON within a text."""
    arguments = json.dumps({"user": "ann", "db_password": 'hunter2"!', "note": "stays"})
    body = json.dumps({"X-Api-Key": "hunter2", "call": {"arguments": arguments}, "max_tokens": "7 stays"})
    event = f"data: {body}\n\n".encode()
    for told in (readable_body(body.encode()), readable_body(body.encode(), cut=True), readable_body(event)):
        text = json.dumps(told)
        assert "hunter2" not in text and "ann" in text and text.count("stays") >= 1
    assert json.loads(readable_body(body.encode())["call"]["arguments"])["note"] == "stays"
    for length in range(1, len(body)):
        assert "hunter" not in readable_body(body.encode()[:length], cut=True)


def test_bodies_are_told_as_what_they_are() -> None:
    assert readable_body(b"") is None
    assert readable_body(b'{"a": "sk-proj-abcdefghijklmnop0123"}') == {"a": "[removed]"}
    assert readable_body(b"data: {}\n\n") == "data: {}\n\n"
    assert readable_body(b"RIFF\x00\xff\xfe") == "[7 bytes]"
    assert readable_body(b"[" * 100_000) == "[" * 100_000


def test_what_python_writes_for_no_number_is_a_text() -> None:
    """As NaN, which is no JSON, it would keep other programs from reading the line."""
    assert readable_body(b'{"temperature": NaN, "top": -1e999}') == {"temperature": "NaN", "top": "-Infinity"}


def test_a_cut_leaves_no_half_of_a_secret_or_a_character() -> None:
    whole = json.dumps({"said": "grüße, my key is sk-proj-abcdefghijklmnop0123"}, ensure_ascii=False).encode()
    for length in range(1, len(whole)):
        told = readable_body(whole[:length], cut=True)
        assert "sk-" not in told and "�" not in told


@pytest.mark.parametrize("letter", ["A", "\\", '"', "字"])
def test_a_long_body_without_blanks_holds_nobody_up(letter: str) -> None:
    """A picture, or a Chinese text: meanwhile, the whole gateway stands still."""
    began = time.thread_time()
    told = readable_body(letter.encode() * 400_000, cut=True)
    # it takes a small part of that, and took several times as long
    assert time.thread_time() - began < 2.0
    assert told == letter * (400_000 - 256)


@pytest.mark.parametrize("text", ["eyJ-" * 60_000, '"' + "secret" * 40_000], ids=["tokens", "a field"])
def test_a_text_that_begins_secrets_without_end_holds_nobody_up(text: str) -> None:
    """What a caller may send."""
    began = time.thread_time()
    assert without_secrets(text) == text
    # it takes some hundredths of that, and took many times as long
    assert time.thread_time() - began < 2.0


def test_a_key_is_known_behind_what_begins_like_another() -> None:
    assert text_without_secrets("eyJhbGciOiJIUzI1NiJ9-sk-proj-abcdefghijklmnop0123") == "eyJhbGciOiJIUzI1NiJ9-[removed]"
    assert text_without_secrets("eyJhbGciOiJIUzI1NiJ9.no eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.s") == (
        "eyJhbGciOiJIUzI1NiJ9.no [removed]"
    )


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://user:pass@host:10086/x", "http://host:10086/x"),
        ("https://host/v1", "https://host/v1"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_address_without_its_password(url: str, told: str) -> None:
    assert without_credentials(url) == told
