"""Where verl's vLLM replicas answer and which weights they have: verl and Ray internals, kept in this one file.

Written against verl 0.9.1 (the exact version is pinned), where a server's weight version and the event loop of its
HTTP server have no public accessor.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import ray

from adapters.verl.token_in import OUTCOMES, TokenIn

#: seconds for a call that reads an attribute, or pauses or resumes vLLM
CALL_TIMEOUT = 60.0


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
            # Ray runs this beside the event loop of vLLM's server
            loop = server._server_task.get_loop()
            asyncio.run_coroutine_threadsafe(work(server.engine), loop).result(CALL_TIMEOUT)

        self._on_servers(run)

    def _on_servers(self, work: Callable[[Any], Any]) -> list[Any]:
        """What ``work`` gives in the process of each server."""
        return ray.get([handle.__ray_call__.remote(work) for handle in self._handles], timeout=CALL_TIMEOUT)


def _install_token_in(server: Any) -> None:
    server.swarm_token_in = TokenIn.install()
