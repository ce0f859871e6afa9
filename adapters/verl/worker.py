"""The trainer's worker process: verl's own, with two corrections that verl leaves to subclasses.

Invariant: two runs on one machine never share the socket that carries weights from the trainer to vLLM.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from adapters.verl.weights_socket import private_handle


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cpu"])
class CpuEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine on the CPU."""

    def _build_fsdp_module(self, module: Any) -> Any:
        # verl keeps a forward-only model (the reference of the KL loss) in pinned host memory, which torch has only
        # beside an accelerator; here it is in host memory anyway
        config = self.engine_config
        self.engine_config = dataclasses.replace(config, forward_only=False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = config


class SwarmWorker(ActorRolloutRefWorker):
    """Actor, rollout adapter and reference model of one device."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the models, then move the weight socket to a path of this run."""
        super().init_model()
        if self.rollout is not None:
            self.rollout.zmq_handle = private_handle(self.rollout.zmq_handle)


class CpuTrainingWorker(TrainingWorker):
    """Training engine on the CPU."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        # verl would ask torch for "cpu:gloo,cpu:gloo", which it refuses as a duplicate; verl leaves a group that
        # exists alone
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                backend="gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                init_method=os.environ.get("DIST_INIT_METHOD"),
            )
        super().__init__(config)


class SwarmCpuWorker(SwarmWorker):
    """:class:`SwarmWorker` whose engines run on the CPU."""

    actor_worker_cls = CpuTrainingWorker
    ref_worker_cls = CpuTrainingWorker
