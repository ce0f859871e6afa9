"""A process of its own, because importing verl takes long: verl's real worker on a CPU, as a rank without others.

Reads ``{"model": folder, "checkpoint": folder}`` from stdin, and prints what :func:`resumed`, :func:`merged` and
:func:`adapter` give.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["VERL_USE_EXTERNAL_MODULES"] = "adapters.verl.cpu_platform"
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}

import torch
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from adapters.verl import worker as worker_module
from adapters.verl.config import verl_config
from adapters.verl.worker import SwarmCpuWorker
from swarm.job import TrainJob

worker_module.NICENESS = 0
OPTIMIZER = "actor_rollout_ref.actor.optim"
RANK, ALPHA = 4, 16


def make_worker(model: str, overrides: dict[str, Any], **changes: Any) -> SwarmCpuWorker:
    fields = {"model": model, "device": "cpu", "max_prompt_length": 128, "max_response_length": 64}
    job = TrainJob.model_validate(fields | changes | {"overrides": overrides})
    config = verl_config(job, model, Path(tempfile.gettempdir()), "cpu").actor_rollout_ref
    # as the trainer does
    config.actor.optim.total_training_steps = 10
    worker = SwarmCpuWorker(config=config, role="actor")
    worker.init_model()
    return worker


def resumed(model: str, checkpoint: str) -> dict[str, Any]:
    """A worker saves a checkpoint as if from a GPU, and another one, which has none, goes on from it with another rate:
    the learning rates of its next two steps, its weight decay, and whether it has the moments of the one before."""

    def rated(lr: float, weight_decay: float) -> SwarmCpuWorker:
        return make_worker(model, {f"{OPTIMIZER}.lr_warmup_steps": 4, f"{OPTIMIZER}.weight_decay": weight_decay}, lr=lr)

    def moments(engine: Any) -> list[float]:
        return [float(state["exp_avg"].sum()) for state in engine.optimizer.state.values()]

    before = rated(1e-3, 0.5).actor.engine
    for parameter in before.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before.optimizer.step()
    before.lr_scheduler_step()
    with patch("torch.serialization.location_tag", lambda storage: "cuda:0"):
        before.save_checkpoint(checkpoint)
    worker = rated(1e-2, 0.0)
    worker.load_checkpoint(checkpoint)
    engine = worker.actor.engine
    [group] = engine.optimizer.param_groups
    return {
        "rates": [group["lr"], engine.lr_scheduler_step()],
        "weight_decay": group["weight_decay"],
        "moments": moments(engine) == moments(before) != [],
    }


def merged(model: str) -> dict[str, Any]:
    """What a worker sends to vLLM where it merges an adapter into the weights: the types of these weights, the largest
    difference from those that the trainer computes with, and by how much its own weights have changed afterwards."""
    lora = {"rank": RANK, "alpha": ALPHA}
    engine = make_worker(model, {"actor_rollout_ref.model.lora.merge": True}, lora=lora).actor.engine

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
    return {"types": sorted({str(weight.dtype) for _, weight in sent}), "far": far, "changed": changed}


def adapter(model: str) -> dict[str, Any]:
    """What a worker sends to vLLM of an adapter: how many weights, and whether they, their names and the adapter's
    configuration are those that verl's own engine would send."""
    engine = make_worker(model, {}, lora={"rank": RANK, "alpha": ALPHA}).actor.engine
    sent, config = engine.get_per_tensor_param(base_sync_done=True)
    weights = dict(sent)
    wanted, wanted_config = FSDPEngineWithLMHead.get_per_tensor_param(engine, base_sync_done=True)
    equal = [torch.equal(weights[name], weight) for name, weight in wanted]
    return {"weights": len(weights), "equal": sum(equal), "configured": config == wanted_config}


def main() -> None:
    asked = json.load(sys.stdin)
    model = asked["model"]
    found = {"resumed": resumed(model, asked["checkpoint"]), "merged": merged(model), "adapter": adapter(model)}
    torch.distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
