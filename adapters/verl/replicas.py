"""Where verl's vLLM replicas answer, which weights they have, and whether they outlive their trainer: verl and Ray
internals, kept in this one file.

Written against verl 0.9.1 (the exact version is pinned), where a server's weight version and the event loop of its
HTTP server have no public accessor.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import ray
import ray.exceptions
from ray.util import list_named_actors

from adapters.verl.token_in import OUTCOMES, TokenIn
from swarm.errors import EngineError

#: seconds for a call that reads an attribute, or pauses or resumes vLLM
CALL_TIMEOUT = 60.0
#: seconds within which a vLLM that is well says whether it is paused; less than the server allows the trainer's silence
ANSWER_TIMEOUT = 4.0
#: seconds within which the actors of a dead trainer go
END_TIMEOUT = 30.0
#: verl names the first server of its first replica so
FIRST_SERVER = "vllm_server_0_0"


def outlives_trainer(config: Any) -> bool:
    """Whether vLLM serves on when the trainer dies, by verl's full configuration.

    It must be awake while the trainer computes, in a Ray cluster of the run's own, for a trainer of one process.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    return trainer.nnodes == 1 and trainer.n_gpus_per_node == 1 and not rollout.free_cache_engine


def find_server() -> Any | None:
    """The actor of the first vLLM server of this run; ``None`` while there is none."""
    try:
        return ray.get_actor(FIRST_SERVER)
    except ValueError:
        return None


def serves_on() -> bool:
    """Whether the vLLM of a trainer that died serves: it is alive, and was not paused for new weights."""
    if (server := find_server()) is None:
        return False
    with contextlib.suppress(ray.exceptions.RayError):
        paused = server.__ray_call__.remote(lambda it: _on_loop(it, it.engine.is_paused(), ANSWER_TIMEOUT))
        return not ray.get(paused, timeout=ANSWER_TIMEOUT)
    return False


def end_trainer(runner: Any) -> None:
    """End the actor ``runner``, and wait until no actor with a name is left but the vLLM that outlives it.

    Raises:
        EngineError: some are left: another trainer could not use their names.
    """
    ray.kill(runner)
    deadline = time.monotonic() + END_TIMEOUT
    while left := [one["name"] for one in list_named_actors(all_namespaces=True) if one["name"] != FIRST_SERVER]:
        if time.monotonic() > deadline:
            raise EngineError(f"processes of the trainer that failed are left after {END_TIMEOUT:.0f} s: {left}")
        time.sleep(0.1)


def _on_loop(server: Any, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
    """The result of ``work`` on the event loop of vLLM's server; Ray runs what it is sent beside that loop."""
    return asyncio.run_coroutine_threadsafe(work, server._server_task.get_loop()).result(timeout)


class Replicas:
    """The vLLM servers of one run.

    Args:
        manager: verl's ``LLMServerManager``, which has started them.
    """

    def __init__(self, manager: Any) -> None:
        #: ``host:port`` of each replica's OpenAI server
        self.addresses: list[str] = list(manager.server_addresses)
        self._handles = list(manager.server_handles)
        # verl's router for its own agent loops; the swarm server routes. It would hold 0.8 GB with its imports.
        ray.kill(manager.global_load_balancer)
        self._on_servers(_install_token_in)

    def policy_version(self) -> int:
        """The training step whose weights all replicas have.

        Raises:
            RuntimeError: the replicas disagree, so that no answer could be attributed to one policy.
        """
        versions = set(self._on_servers(lambda server: server.global_steps))
        if len(versions) != 1 or None in versions:
            raise RuntimeError(f"the vLLM replicas serve different weights: versions {sorted(map(str, versions))}")
        return int(versions.pop())

    def take_histories(self) -> dict[str, float]:
        """Step metrics: of the prompts with an earlier answer since the last time, how many had each outcome, see
        :data:`adapters.verl.token_in.OUTCOMES`."""
        counts = sum(self._on_servers(lambda server: Counter(server.swarm_token_in.take())), Counter())
        return {f"swarm/history_{name}": float(counts[name]) for name in OUTCOMES}

    def pause(self) -> None:
        """Hold all requests where they are and forget what was computed for them: they go on with the new weights.

        Without clearing the cache vLLM would go on with keys and values of the old weights.
        """
        self._on_engine(lambda engine: engine.pause_generation(mode="keep", clear_cache=True))

    def resume(self) -> None:
        """Go on with the requests that :meth:`pause` held."""
        self._on_engine(lambda engine: engine.resume_generation())

    def _on_engine(self, work: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        def run(server: Any) -> None:
            _on_loop(server, work(server.engine), CALL_TIMEOUT)

        self._on_servers(run)

    def _on_servers(self, work: Callable[[Any], Any]) -> list[Any]:
        """What ``work`` gives in the process of each server."""
        return ray.get([handle.__ray_call__.remote(work) for handle in self._handles], timeout=CALL_TIMEOUT)


def _install_token_in(server: Any) -> None:
    server.swarm_token_in = TokenIn.install()
