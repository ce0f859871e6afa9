"""What vLLM says of an answer, corrected: whether it was aborted, and how many tokens of its prompt were in the cache.

Written against vLLM 0.24 and 0.28. A chat in which a tool call has begun ends with ``tool_calls`` over every finish
reason, as if the half call were whole; its ``stop_reason`` is handed on as it is. A call is counted by the answer that
ends last; but each answer except the first finds the whole prompt in the cache, put there by the first, so that a call
with several answers would always seem to be cached.
"""

from __future__ import annotations

from typing import Any

from swarm.tokens import ABORTED


def correct(requests: Any) -> None:
    """Have each aborted answer say so in its stop reason, and each call report the least of its answers' cached tokens.

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
        if (call := state.parent_req) is not None:
            # 0.28 also counts what the answer has put there
            counts = state.num_cached_tokens, getattr(state, "num_cache_creation_tokens", 0)
            call.swarm_cached = least = min(counts, getattr(call, "swarm_cached", counts))
            state.num_cached_tokens, state.num_cache_creation_tokens = least
        return make(state, new_token_ids, pooling_output, finish_reason, stop_reason, *more, **named)

    requests.make_request_output = make_request_output


def install() -> None:
    """Wrap the requests of the vLLM in this process."""
    from vllm.v1.engine.output_processor import RequestState

    correct(RequestState)
