"""Calls of vLLM's servers, which run beside the loop that serves; aborted answers, and cached tokens of calls with
several answers, with a request of vLLM's shape."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the cpu or gpu extra")
import ray

from adapters.verl import replicas
from adapters.verl.replicas import correct_outputs
from swarm.tokens import ABORTED


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Of vLLM's HTTP server."""
    serving = asyncio.new_event_loop()
    thread = threading.Thread(target=serving.run_forever)
    thread.start()
    yield serving
    serving.call_soon_threadsafe(serving.stop)
    thread.join()
    serving.close()


def test_a_pause_and_the_next_trainer_wait_for_a_step_of_vllm_that_takes_longer_than_a_call(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[str] = []

    async def pause_generation(mode: str, clear_cache: bool) -> None:
        # a prompt of many tokens, which vLLM computes in one step
        await asyncio.sleep(0)
        paused.append(mode)

    async def is_paused() -> bool:
        await asyncio.sleep(0)
        return bool(paused)

    server = SimpleNamespace(
        engine=SimpleNamespace(pause_generation=pause_generation, is_paused=is_paused),
        _server_task=SimpleNamespace(get_loop=lambda: loop),
    )
    servers: Any = replicas.VllmServers.__new__(replicas.VllmServers)
    call = SimpleNamespace(remote=lambda work: work(server))
    servers._handles = [handle] = [SimpleNamespace(__ray_call__=call)]
    allowed: list[float] = []
    monkeypatch.setattr(replicas, "CALL_TIMEOUT", 0.0)
    monkeypatch.setattr(ray, "get", lambda results, timeout: allowed.append(timeout) or results)
    replicas.check_serving(handle)
    servers.pause()
    assert paused == ["keep"] and min(allowed) > 0


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

    correct_outputs(Request)
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
