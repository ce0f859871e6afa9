"""How many tokens of a prompt vLLM had computed before: for a call with several answers, of the one that began first.

Written against vLLM 0.24 and 0.28, which count a call by the answer that ends last. Each answer but the first finds
the whole prompt in the cache, put there by the first: the call would always seem to be cached.
"""

from __future__ import annotations

from typing import Any


def count_first(requests: Any) -> None:
    """Have each call report the least of its answers' cached tokens.

    Args:
        requests: vLLM's class of a request with one answer; its ``make_request_output`` is wrapped.
    """
    make = requests.make_request_output

    def make_request_output(state: Any, *args: Any, **kwargs: Any) -> Any:
        if (call := state.parent_req) is not None:
            # 0.28 also counts what the answer has put there
            counts = state.num_cached_tokens, getattr(state, "num_cache_creation_tokens", 0)
            call.swarm_cached = least = min(counts, getattr(call, "swarm_cached", counts))
            state.num_cached_tokens, state.num_cache_creation_tokens = least
        return make(state, *args, **kwargs)

    requests.make_request_output = make_request_output


def install() -> None:
    """Wrap the requests of the vLLM in this process."""
    from vllm.v1.engine.output_processor import RequestState

    count_first(RequestState)
