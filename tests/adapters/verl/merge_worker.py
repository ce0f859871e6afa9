"""A process of its own: what verl's real worker on a CPU sends to vLLM where it merges an adapter into the weights.

Reads ``{"model": folder}`` from stdin. Prints the types of the weights that are sent, the largest difference from those
that the trainer computes with, and by how much its own weights have changed afterwards.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["VERL_USE_EXTERNAL_MODULES"] = "adapters.verl.cpu_platform"
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}

import torch

from adapters.verl import worker as worker_module
from adapters.verl.config import verl_config
from adapters.verl.worker import SwarmCpuWorker
from swarm.job import TrainJob

worker_module.NICENESS = 0
RANK, ALPHA = 4, 16


def main() -> None:
    model = json.load(sys.stdin)["model"]
    fields = {"model": model, "device": "cpu", "max_prompt_length": 128, "max_response_length": 64}
    fields |= {"lora": {"rank": RANK, "alpha": ALPHA}, "overrides": {"actor_rollout_ref.model.lora.merge": True}}
    job = TrainJob.model_validate(fields)
    config = verl_config(job, model, Path(tempfile.gettempdir()), "cpu").actor_rollout_ref
    config.actor.optim.total_training_steps = 10
    worker = SwarmCpuWorker(config=config, role="actor")
    worker.init_model()
    engine = worker.actor.engine

    def weights() -> dict[str, torch.Tensor]:
        named = engine.module.state_dict().items()
        return {name.removeprefix("base_model.model."): weight.full_tensor().clone() for name, weight in named}

    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1e-4)
    before = weights()
    # what is sent is read once the next one is asked for, and after the last
    sent = list(engine.get_per_tensor_param()[0])
    after = weights()
    far = 0.0
    for name, weight in sent:
        layer, _, kind = name.rpartition(".")
        wanted = before[name if name in before else f"{layer}.base_layer.{kind}"]
        if kind == "weight" and f"{layer}.lora_A.default.weight" in before:
            halves = (before[f"{layer}.lora_{half}.default.weight"] for half in "BA")
            wanted = wanted + ALPHA / RANK * torch.matmul(*halves)
        far = max(far, float((weight.float() - wanted).abs().max()))
    changed = max(float((after[name] - weight).abs().max()) for name, weight in before.items())
    torch.distributed.destroy_process_group()
    print(json.dumps({"types": sorted({str(weight.dtype) for _, weight in sent}), "far": far, "changed": changed}))


if __name__ == "__main__":
    main()
