"""Conversations put together from other dialects: the work grows with the request, not with its square."""

from __future__ import annotations

import time
from typing import Any

import pytest

from adapters.dialects import Dialect, MessagesDialect, ResponsesDialect

MANY, LONG = 20_000, "x" * 500
HI = {"role": "user", "content": "hi"}


def messages(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": 9, "messages": [HI, *turns, HI]}


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (
            MessagesDialect(),
            messages({"role": "assistant", "content": [{"type": "text", "text": LONG}] * MANY}),
        ),
        (
            MessagesDialect(),
            messages({"role": "assistant", "content": [{"type": "thinking", "thinking": LONG}] * MANY}),
        ),
        (MessagesDialect(), messages(*[{"role": "system", "content": LONG}] * MANY)),
        (ResponsesDialect(), {"input": [{"type": "reasoning", "content": [{"text": LONG}]}] * MANY}),
        (
            ResponsesDialect(),
            {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": LONG}] * MANY}]},
        ),
        (ResponsesDialect(), {"input": [HI, *[{"role": "developer", "content": LONG}] * MANY]}),
    ],
    ids=["texts", "thoughts", "system turns", "reasoning items", "text parts", "developer items"],
)
def test_many_small_pieces_are_joined_once(dialect: Dialect, body: dict[str, Any]) -> None:
    """10 MB in 20,000 pieces: less than a second of work, but 100 GB of copies if each piece copied those before it."""
    began = time.process_time()
    dialect.parse(body)
    assert time.process_time() - began < 6
