"""verl's vLLM replica as an actor that outlives its trainer: the next trainer of the same run takes it over.

Only the driver's Ray cluster ends it, so it must be a cluster of the run's own; and only a trainer of one process finds
its device in the same place again. Imported by whoever starts vLLM: it imports vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from adapters.verl.causes import VllmDiedError
from adapters.verl.lora import ADAPTERS, ROOM
from adapters.verl.replicas import FIRST_SERVER, check_serving, has_server


class SwarmVllmServer(vLLMHttpServer):
    """verl's server of vLLM, where a batch may hold an adapter of a kept version beside the newest, and a context is as
    long as vLLM takes it."""

    def _validate_configs(self) -> None:
        # vLLM refuses what is too long, too, and knows how far scaled rotary embeddings stretch a context
        with contextlib.suppress(ValueError):
            super()._validate_configs()

    async def run_server(self, args: argparse.Namespace) -> None:
        await super().run_server(_with_kept_adapters(args))

    async def run_headless(self, args: argparse.Namespace) -> None:
        await super().run_headless(_with_kept_adapters(args))


def _with_kept_adapters(args: argparse.Namespace) -> argparse.Namespace:
    if args.enable_lora:
        args.max_loras, args.max_cpu_loras = ADAPTERS, ROOM
    return args


class SwarmReplica(vLLMReplica):
    """A replica whose servers are ours."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(SwarmVllmServer)


class LastingReplica(SwarmReplica):
    """A replica of one server.

    Attributes:
        taken_over: whether its server was there already, with the weights of an earlier trainer.
    """

    taken_over = False
    #: of :func:`start_early`
    early: Future[None] | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(lifetime="detached")(SwarmVllmServer)

    async def launch_servers(self) -> None:
        """Start the server, or take over the one that was started early or serves."""
        if self.early is not None:
            await asyncio.wrap_future(self.early)
        elif not has_server():
            await super().launch_servers()
            return
        try:
            server = ray.get_actor(FIRST_SERVER)
        except ValueError:
            raise VllmDiedError("vLLM died while the trainer loaded its model") from None
        check_serving(server)
        self.taken_over = self.early is None
        self.servers = [server]
        self._server_handle = server
        host, port = await server.get_server_address.remote()
        self._server_address = f"{host}:{port}"

    async def sleep(self) -> None:
        """Nothing: it serves while the trainer computes. verl's own waits until no request runs."""


class _NoDevice:
    """In the place of a worker, whose device verl asks for to have vLLM share it."""

    class __ray_call__:
        @staticmethod
        async def remote(_: Any) -> tuple[str, str]:
            return ray.get_runtime_context().get_node_id(), "0"


def start_early(config: Any) -> None:
    """Begin to start the server of a run on a CPU, by verl's full configuration, before the trainer has a worker.

    Each of both loads libraries for some ten seconds, on one core; a GPU, which they share, is left to one at a time.
    """
    rollout = config.actor_rollout_ref.rollout
    replica = LastingReplica(0, rollout, config.actor_rollout_ref.model, rollout.n_gpus_per_node)
    replica.rollout_mode, replica.workers = RolloutMode.HYBRID, [_NoDevice()]
    LastingReplica.early = ThreadPoolExecutor(1, "vllm").submit(asyncio.run, vLLMReplica.launch_servers(replica))
