"""An adapter (LoRA) in place of all weights: what a job implies for verl, and which adapter vLLM's HTTP server samples
with.

Invariant: once weights were synced, every request over HTTP is sampled with the adapter that came last, and what vLLM
keeps of a prompt is of one version.

verl gives its adapter to its own calls of vLLM alone; a request over HTTP would be answered by the base model. It loads
each version into vLLM under the same number, and vLLM keeps the keys and values of a prompt by the adapter's name, so
there is a new name after each sync. Written against vLLM 0.24 and 0.28, where nobody but the HTTP server can reach the
table in which it looks up the adapter of a request.
"""

from __future__ import annotations

from typing import Any

from swarm.job import TrainJob

MODEL = "actor_rollout_ref.model"


def lora_values(job: TrainJob) -> dict[str, Any]:
    """What ``job.lora`` implies, as dotted verl keys."""
    if job.lora is None:
        return {}
    targets = job.lora.targets
    return {
        f"{MODEL}.lora_rank": job.lora.rank,
        f"{MODEL}.lora_alpha": job.lora.alpha,
        f"{MODEL}.target_modules": targets if isinstance(targets, str) else list(targets),
    }


def syncs_adapter(config: Any) -> bool:
    """Whether vLLM gets an adapter and no whole weights, by verl's full configuration."""
    model = config.actor_rollout_ref.model
    return model.lora_rank > 0 and not model.lora.merge


class PolicyAdapter:
    """The adapter that requests are sampled with in a process that serves vLLM, for as long as that lives.

    Args:
        serving: vLLM's class whose ``_maybe_get_adapters`` looks up the adapter of a request; it is replaced.
    """

    def __init__(self, serving: Any) -> None:
        # until the first sync vLLM has none, and the base model is the policy
        self._request: Any = None
        self._changes = 0

        def adapter(*_: Any, **__: Any) -> Any:
            return self._request

        serving._maybe_get_adapters = adapter

    @classmethod
    def install(cls) -> PolicyAdapter:
        """Have the vLLM in this process ask for it."""
        from vllm.entrypoints.serve.engine.serving import BaseServing

        return cls(BaseServing)

    def change(self, version: int) -> None:
        """From now on requests get the adapter that verl has loaded, which is of this policy version; those that
        vLLM holds get it too, since it has the number of the one before."""
        from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_PATH
        from vllm.lora.request import LoRARequest

        # a trainer that goes back to a checkpoint trains its versions again, with other weights
        self._changes += 1
        self._request = LoRARequest(f"policy@{version}.{self._changes}", VLLM_LORA_INT_ID, VLLM_LORA_PATH)
