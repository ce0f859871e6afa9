"""Where verl's vLLM replicas answer and which weights they have: verl and Ray internals, kept in this one file.

Written against verl 0.9.1 (the exact version is pinned): neither the registry of servers nor the weight version of a
server has a public accessor there.
"""

from __future__ import annotations

from typing import Any

import ray

#: seconds; these calls only read attributes of idle actors
CALL_TIMEOUT = 60.0


class Replicas:
    """The vLLM servers of one run.

    Args:
        llm_client: verl's ``LLMServerClient``, from ``trainer.get_llm_client()``.
    """

    def __init__(self, llm_client: Any) -> None:
        servers = ray.get(llm_client._load_balancer.get_all_servers.remote(), timeout=CALL_TIMEOUT)
        #: ``host:port`` of each replica's OpenAI server
        self.addresses: list[str] = list(servers)
        self._handles = [ray.get_actor(f"vllm_server_{rank}_0") for rank in range(len(self.addresses))]

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
