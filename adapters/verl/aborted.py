"""Answers that vLLM aborts, marked as such: a chat in which a tool call has begun ends with ``tool_calls`` all the
same, as if the half call were whole.

Written against vLLM 0.24 and 0.28, whose chat puts ``tool_calls`` over every finish reason, and hands on the
``stop_reason`` as it is.
"""

from __future__ import annotations

from typing import Any

from swarm.tokens import ABORTED


def mark_aborted(requests: Any) -> None:
    """Have each aborted answer say so in its stop reason.

    Args:
        requests: vLLM's class of a request with one answer; its ``make_request_output`` is wrapped.
    """
    make = requests.make_request_output

    def make_request_output(
        state: Any,
        new_token_ids: Any,
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        if finish_reason is not None and finish_reason.name == "ABORT":
            stop_reason = ABORTED
        return make(state, new_token_ids, pooling_output, finish_reason, stop_reason, *more, **named)

    requests.make_request_output = make_request_output


def install() -> None:
    """Wrap the requests of the vLLM in this process."""
    from vllm.v1.engine.output_processor import RequestState

    mark_aborted(RequestState)
