"""verl's vLLM replica as an actor that outlives its trainer: the next trainer of the same run takes it over.

Only the driver's Ray cluster ends it, so it must be a cluster of the run's own; and only a trainer of one process finds
its device in the same place again. Imported by whoever starts vLLM: it imports vLLM.
"""

from __future__ import annotations

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from adapters.verl.replicas import FIRST_SERVER, check_serving, has_server


class LastingReplica(vLLMReplica):
    """A replica of one server.

    Attributes:
        taken_over: whether its server was there already, with the weights of an earlier trainer.
    """

    taken_over = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(lifetime="detached")(vLLMHttpServer)

    async def launch_servers(self) -> None:
        """Start the server, or take over the one that serves."""
        if not has_server():
            await super().launch_servers()
            return
        server = ray.get_actor(FIRST_SERVER)
        check_serving(server)
        self.taken_over = True
        self.servers = [server]
        self._server_handle = server
        host, port = await server.get_server_address.remote()
        self._server_address = f"{host}:{port}"

    async def sleep(self) -> None:
        """Nothing: it serves while the trainer computes. verl's own waits until no request runs."""
