"""Where verl's vLLM replicas answer and which weights they have: verl and Ray internals, kept in this one file.

Written against verl 0.9.1 (the exact version is pinned): a server's weight version has no public accessor there.
"""

from __future__ import annotations

from typing import Any

import ray

#: seconds; these calls only read attributes of idle actors
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

    def policy_version(self) -> int:
        """The training step whose weights all replicas have.

        Raises:
            RuntimeError: the replicas disagree, so that no answer could be attributed to one policy.
        """
        refs = [handle.__ray_call__.remote(lambda server: server.global_steps) for handle in self._handles]
        versions = set(ray.get(refs, timeout=CALL_TIMEOUT))
        if len(versions) != 1 or None in versions:
            raise RuntimeError(f"the vLLM replicas serve different weights: versions {sorted(map(str, versions))}")
        return int(versions.pop())
