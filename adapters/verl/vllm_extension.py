"""What verl's engine needs inside a vLLM worker process; given to vLLM as ``worker_extension_cls``."""

from __future__ import annotations

import vllm._custom_ops as ops
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.platforms import current_platform

from adapters.verl.meeting import private_handle

if current_platform.is_cpu():
    # vLLM packs linear weights for oneDNN once and frees the originals: a later load finds nothing to load into, fails
    # in the worker, and the trainer waits for its answer for ever. The plain torch kernels keep the weights.
    ops._supports_onednn = False
    # a class method there; vLLM asks for the name when it makes the layers of a model with adapters
    type(current_platform).get_punica_wrapper = classmethod(lambda _: "adapters.verl.dense_lora.DenseLora")


class SwarmWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension, listening for weights on the socket of this run."""

    def _get_zmq_handle(self) -> str:
        return private_handle(super()._get_zmq_handle())
