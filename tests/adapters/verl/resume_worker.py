"""A process of its own: verl's real worker saves a checkpoint, and another one, with another rate, goes on from it.

Reads ``{"model": folder, "checkpoint": folder}`` from stdin. Prints of the worker that goes on the learning rates of
the next two steps, the weight decay, and whether it has the moments of the one before.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["VERL_USE_EXTERNAL_MODULES"] = "adapters.verl.cpu_platform"
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}

import torch

from adapters.verl import worker as worker_module
from adapters.verl.config import verl_config
from adapters.verl.worker import SwarmCpuWorker
from swarm.job import TrainJob

worker_module.NICENESS = 0
OPTIMIZER = "actor_rollout_ref.actor.optim"


def make_worker(model: str, lr: float, weight_decay: float) -> SwarmCpuWorker:
    overrides = {f"{OPTIMIZER}.lr_warmup_steps": 4, f"{OPTIMIZER}.weight_decay": weight_decay}
    fields = {"model": model, "device": "cpu", "lr": lr, "max_prompt_length": 128, "max_response_length": 64}
    job = TrainJob.model_validate(fields | {"overrides": overrides})
    config = verl_config(job, model, Path(tempfile.gettempdir()), "cpu").actor_rollout_ref
    # as the trainer does
    config.actor.optim.total_training_steps = 10
    worker = SwarmCpuWorker(config=config, role="actor")
    worker.init_model()
    return worker


def moments(engine: Any) -> list[float]:
    return [float(state["exp_avg"].sum()) for state in engine.optimizer.state.values()]


def main() -> None:
    asked = json.load(sys.stdin)
    before = make_worker(asked["model"], 1e-3, 0.5).actor.engine
    for parameter in before.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before.optimizer.step()
    before.lr_scheduler_step()
    before.save_checkpoint(asked["checkpoint"])
    worker = make_worker(asked["model"], 1e-2, 0.0)
    worker.load_checkpoint(asked["checkpoint"])
    engine = worker.actor.engine
    [group] = engine.optimizer.param_groups
    told = {
        "rates": [group["lr"], engine.lr_scheduler_step()],
        "weight_decay": group["weight_decay"],
        "moments": moments(engine) == moments(before) != [],
    }
    torch.distributed.destroy_process_group()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
