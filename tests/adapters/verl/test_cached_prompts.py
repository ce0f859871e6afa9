"""Cached tokens of calls with several answers, with a request of vLLM's shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from adapters.verl.cached_prompts import count_first


def make_class() -> type:
    class Request:
        """Its answer is known to be cached once its prompt is computed."""

        def __init__(self, call: Any, cached: int) -> None:
            self.parent_req, self.num_cached_tokens = call, cached
            # of a prompt of 100
            self.num_cache_creation_tokens = 100 - cached

        def make_request_output(self, text: str, *, last: bool = True) -> tuple[str, int] | None:
            return (text, self.num_cached_tokens) if last else None

    count_first(Request)
    return Request


def test_a_call_is_as_cached_as_the_answer_that_began_first() -> None:
    request, call = make_class(), SimpleNamespace()
    first, second, third = request(call, 32), request(call, 96), request(call, 96)
    assert second.make_request_output("b", last=False) is None
    assert first.make_request_output("a", last=False) is None
    assert first.make_request_output("a", last=False) is None
    assert third.make_request_output("c") == ("c", 32)
    assert third.num_cache_creation_tokens == 68
    # another call on the same prompt
    again = SimpleNamespace()
    assert [request(again, 96).make_request_output(text) for text in "ab"] == [("a", 96), ("b", 96)]


def test_a_call_with_one_answer_is_left_alone() -> None:
    request = make_class()
    assert [request(None, cached).make_request_output("a") for cached in (64, 0, 96)] == [
        ("a", 64),
        ("a", 0),
        ("a", 96),
    ]
