"""Aborted answers, and cached tokens of calls with several answers, with a request of vLLM's shape."""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from adapters.verl.vllm_outputs import correct
from swarm.tokens import ABORTED


class FinishReason(IntEnum):
    """As vLLM's."""

    STOP = 0
    ABORT = 2


def make_class() -> type:
    class Request:
        """Its answer is known to be cached once its prompt is computed."""

        def __init__(self, call: Any = None, cached: int = 0) -> None:
            self.parent_req, self.num_cached_tokens = call, cached
            # of a prompt of 100
            self.num_cache_creation_tokens = 100 - cached

        def make_request_output(
            self,
            new_token_ids: Any,
            pooling_output: Any,
            finish_reason: Any,
            stop_reason: Any,
            *more: Any,
            **named: Any,
        ) -> tuple[Any, ...]:
            return new_token_ids, finish_reason, stop_reason, *more, named

    correct(Request)
    return Request


def cached(request: Any) -> int:
    """Cached tokens as the request reports them with its next output."""
    request.make_request_output([1], None, None, None)
    return request.num_cached_tokens


def test_an_aborted_answer_says_so_in_its_stop_reason() -> None:
    request = make_class()()
    assert request.make_request_output([1], None, None, None, "kv") == ([1], None, None, "kv", {})
    assert request.make_request_output([1], None, FinishReason.STOP, "END") == ([1], FinishReason.STOP, "END", {})
    aborted = request.make_request_output(
        new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None, kv=1
    )
    assert aborted == ([], FinishReason.ABORT, ABORTED, {"kv": 1})


def test_a_call_is_as_cached_as_the_answer_that_began_first() -> None:
    request, call = make_class(), SimpleNamespace()
    first, second, third = request(call, 32), request(call, 96), request(call, 96)
    cached(second)
    assert cached(first) == 32
    assert cached(first) == 32
    assert cached(third) == 32
    assert third.num_cache_creation_tokens == 68
    # another call on the same prompt
    again = SimpleNamespace()
    assert [cached(request(again, 96)) for _ in "ab"] == [96, 96]


def test_a_call_with_one_answer_is_left_alone() -> None:
    request = make_class()
    assert [cached(request(None, tokens)) for tokens in (64, 0, 96)] == [64, 0, 96]
