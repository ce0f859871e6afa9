"""Aborted answers are marked, with a request of vLLM's shape."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from adapters.verl.aborted import mark_aborted
from swarm.tokens import ABORTED


class FinishReason(IntEnum):
    """As vLLM's."""

    STOP = 0
    ABORT = 2


def test_an_aborted_answer_says_so_in_its_stop_reason() -> None:
    class Request:
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

    mark_aborted(Request)
    request: Any = Request()
    assert request.make_request_output([1], None, None, None, "kv") == ([1], None, None, "kv", {})
    assert request.make_request_output([1], None, FinishReason.STOP, "END") == ([1], FinishReason.STOP, "END", {})
    aborted = request.make_request_output(
        new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None, kv=1
    )
    assert aborted == ([], FinishReason.ABORT, ABORTED, {"kv": 1})
