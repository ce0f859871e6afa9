"""Where verl's vLLM replicas answer, which weights they have, whether they outlive their trainer, and what of their
answers is put right: verl, vLLM and Ray internals, kept in this one file.

Written against verl 0.9.1 (the exact version is pinned), where a server's weight version and the event loop of its
HTTP server have no public accessor.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util import get_placement_group, list_named_actors, placement_group_table, remove_placement_group

from adapters.verl.causes import WEIGHT_SYNC, VllmDiedError
from adapters.verl.lora import PolicyAdapter
from adapters.verl.token_in import OUTCOMES, TokenIn
from swarm.errors import EngineError
from swarm.tokens import ABORTED

#: seconds for a call that reads an attribute, or resumes vLLM
CALL_TIMEOUT = 60.0
#: seconds within which the actors of a dead trainer go
END_TIMEOUT = 30.0
#: requests that ended, whose ids a vLLM server remembers until the next sync; their count of tokens
ENDED_KEPT, ENDED = 4096, 2**31 - 1
#: verl names the first server of its first replica so
FIRST_SERVER = "vllm_server_0_0"


def outlives_trainer(config: Any) -> bool:
    """Whether vLLM serves on when the trainer dies, by verl's full configuration.

    It must be awake while the trainer computes, in a Ray cluster of the run's own, for a trainer of one process.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    return trainer.nnodes == 1 and trainer.n_gpus_per_node == 1 and not rollout.free_cache_engine


def has_server() -> bool:
    """Whether the first vLLM server of this run is there; to look it up would import vLLM."""
    return FIRST_SERVER in list_named_actors()


def check_serving(server: Any) -> None:
    """Raise :class:`VllmDiedError` unless the vLLM of a trainer that died serves: it was not paused for new weights."""
    # as a pause, it waits for a step of vLLM
    asked = server.__ray_call__.remote(lambda it: _on_loop(it, it.engine.is_paused(), WEIGHT_SYNC))
    try:
        paused = ray.get(asked, timeout=WEIGHT_SYNC)
    except ray.exceptions.RayError as exc:
        # without its cause, which is what people and the driver would be told of instead
        raise VllmDiedError(f"vLLM died with its trainer: {type(exc).__name__}") from None
    if paused:
        raise VllmDiedError("vLLM died: its trainer left it paused")


def end_trainer(runner: Any) -> None:
    """End the actor ``runner``, release its devices, and wait until no actor with a name is left but the vLLM that
    outlives it.

    Raises:
        EngineError: some are left: another trainer could not use their names.
    """
    ray.kill(runner)
    # Ray itself releases what an actor has reserved only when the whole job has ended
    for reserved in placement_group_table().values():
        if reserved["state"] != "REMOVED":
            remove_placement_group(get_placement_group(reserved["name"]))
    deadline = time.monotonic() + END_TIMEOUT
    while left := [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["name"] != FIRST_SERVER]:
        if time.monotonic() > deadline:
            raise EngineError(f"processes of the trainer that failed are left after {END_TIMEOUT:.0f} s: {left}")
        time.sleep(0.1)


def _name(state: Any) -> tuple[str, int]:
    """The id of the answer that vLLM's request belongs to, and the number of its choice."""
    request = state.external_req_id if state.parent_req is None else state.parent_req.external_req_id
    # a raw prompt is the first of a list
    return request.removesuffix("-0") if request.startswith("cmpl-") else request, state.request_index


def _remember_ended(server: Any) -> None:
    """Have a vLLM server remember the last requests that ended: their answers may be on the way during a sync."""
    processor = server.engine.output_processor
    if hasattr(processor, "swarm_ended"):
        return
    ended = processor.swarm_ended = collections.deque(maxlen=ENDED_KEPT)
    finish = processor._finish_request

    def remember(state: Any) -> None:
        finish(state)
        ended.append(_name(state))

    processor._finish_request = remember


def _sampled(server: Any) -> dict[str, dict[int, int]]:
    processor = server.engine.output_processor
    counts: dict[str, dict[int, int]] = {}
    while processor.swarm_ended:
        request, choice = processor.swarm_ended.popleft()
        counts.setdefault(request, {})[choice] = ENDED
    # of vLLM's event loop, which may take a request in meanwhile: that one has no tokens yet
    for state in list(processor.request_states.values()):
        if state.detokenizer is not None:
            request, choice = _name(state)
            counts.setdefault(request, {})[choice] = state.detokenizer.num_output_tokens()
    return counts


def correct_outputs(requests: Any) -> None:
    """Have each aborted answer say so in its stop reason, and each call report the least of its answers' cached tokens.

    In vLLM 0.24 and 0.28 a chat in which a tool call has begun ends with ``tool_calls`` over every finish reason, as if
    the half call were whole; its ``stop_reason`` is handed on as it is. A call is counted by the answer that ends last;
    but each answer except the first finds the whole prompt in the cache, put there by the first.

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


def _on_loop(server: Any, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
    """The result of ``work`` on the event loop of vLLM's server; Ray runs what it is sent beside that loop."""
    return asyncio.run_coroutine_threadsafe(work, server._server_task.get_loop()).result(timeout)


class VllmServers:
    """The vLLM servers of one run, which verl's ``LLMServerManager`` has started; ``run_dir`` has the adapters of kept
    versions."""

    def __init__(self, manager: Any, run_dir: Path) -> None:
        #: ``host:port`` of each replica's OpenAI server
        self.addresses: list[str] = list(manager.server_addresses)
        self._handles = list(manager.server_handles)
        self._on_servers(_remember_ended)
        # verl's router for its own agent loops; the swarm server routes. It would hold 0.8 GB with its imports.
        ray.kill(manager.global_load_balancer)
        self._on_servers(partial(_install, run_dir=run_dir.resolve()))

    def policy_version(self) -> int:
        """The training step whose weights all replicas have.

        Raises:
            RuntimeError: the replicas disagree, so that no answer could be attributed to one policy.
        """
        versions = set(self._on_servers(lambda server: server.global_steps))
        if len(versions) != 1 or None in versions:
            raise RuntimeError(f"the vLLM replicas serve different weights: versions {sorted(map(str, versions))}")
        return int(versions.pop())

    def weights_synced(self) -> None:
        """Have requests sampled with what verl has just synced, where that was an adapter."""
        self._on_servers(_change_adapter)

    def take_histories(self) -> dict[str, float]:
        """Step metrics: of the prompts with an earlier answer since the last time, how many had each outcome, see
        :data:`adapters.verl.token_in.OUTCOMES`."""
        taken = self._on_servers(lambda server: collections.Counter(server.swarm_token_in.take()))
        counts = sum(taken, collections.Counter[str]())
        return {f"swarm/history_{name}": float(counts[name]) for name in OUTCOMES}

    def sampled(self) -> dict[str, dict[int, int]]:
        """How many tokens each request has that vLLM, which is paused, holds: by the id that its answers have, and by
        choice. Requests that ended since the last call have more than any answer."""
        return {request: counts for of_server in self._on_servers(_sampled) for request, counts in of_server.items()}

    def pause(self) -> None:
        """Hold all requests where they are and forget what was computed for them: they go on with the new weights.

        Without clearing the cache vLLM would go on with keys and values of the old weights.
        """
        # a step of vLLM, which is waited for, may hold a long prompt: on a CPU that takes minutes
        self._on_engine(lambda engine: engine.pause_generation(mode="keep", clear_cache=True), WEIGHT_SYNC)

    def resume(self) -> None:
        """Go on with the requests that :meth:`pause` held."""
        self._on_engine(lambda engine: engine.resume_generation(), CALL_TIMEOUT)

    def _on_engine(self, work: Callable[[Any], Coroutine[Any, Any, None]], seconds: float) -> None:
        def run(server: Any) -> None:
            _on_loop(server, work(server.engine), seconds)

        self._on_servers(run, seconds)

    def _on_servers(self, work: Callable[[Any], Any], seconds: float = CALL_TIMEOUT) -> list[Any]:
        """What ``work`` gives in the process of each server."""
        return ray.get([handle.__ray_call__.remote(work) for handle in self._handles], timeout=seconds)


def _install(server: Any, run_dir: Path) -> None:
    # a server that outlived its trainer has them
    if not hasattr(server, "swarm_token_in"):
        from vllm.entrypoints.serve.engine.serving import BaseServing
        from vllm.v1.engine.output_processor import RequestState

        server.swarm_token_in = TokenIn.install()
        server.swarm_adapter = PolicyAdapter(BaseServing, server.engine, run_dir) if server.lora_as_adapter else None
        correct_outputs(RequestState)


def _change_adapter(server: Any) -> None:
    if server.swarm_adapter is not None:
        server.swarm_adapter.change(server.global_steps)
