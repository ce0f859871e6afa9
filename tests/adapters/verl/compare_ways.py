"""A process of its own, because importing verl takes long: random trees through verl's real FSDP engine, both ways.

Reads ``{"folder": an empty folder, "ways": {a way of attention: number of examples}}`` from stdin. Prints as JSON for
each of the ``ways`` the ``worst`` figures of the examples (differences of log-probabilities and entropy, relative
difference and cosine of the gradients) and how many ``parts`` the tries had, and of some more models whether they were
``refused``, and so trained by rows.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ["VERL_USE_EXTERNAL_MODULES"] = "adapters.verl.cpu_platform"
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}

import torch
import torch.distributed
import torch.nn.attention.flex_attention as torch_flex
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from adapters.verl.config import verl_config
from adapters.verl.tree import attention
from adapters.verl.tree import shared_prefix as tree_engine
from adapters.verl.worker import SwarmCpuWorker
from swarm.job import TrainJob
from tests.adapters.verl.token_trees import token_rows
from tests.engine import tiny_model

ACTOR = "actor_rollout_ref.actor"


def make_worker(folder: Path, config: Any, **overrides: Any) -> SwarmCpuWorker:
    """A worker with a random model."""
    tiny_model.build(folder)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    job = TrainJob(
        model=str(folder),
        device="cpu",
        max_prompt_length=64,
        max_response_length=64,
        kl_coef=0.1,
        overrides={f"{ACTOR}.entropy_coeff": 0.3, **overrides},
    )
    worker = SwarmCpuWorker(config=verl_config(job, job.model, folder, "cpu").actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def make_batch(rows: list[list[int]], chance: random.Random, temperature: float) -> Any:
    """A mini-batch: each row is a prompt of any length and an answer with gaps, perhaps without a sampled token."""

    def nested(values: list[Any], kind: torch.dtype) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(one, dtype=kind) for one in values], layout=torch.jagged)

    prompts = [chance.randint(1, len(row) - 1) for row in rows]
    masks = [[int(chance.random() < 0.7) for _ in row[prompt:]] for row, prompt in zip(rows, prompts, strict=True)]
    masks[0][0] = 1

    def numbers(low: float, high: float) -> torch.Tensor:
        return nested([[chance.uniform(low, high) for _ in mask] for mask in masks], torch.float32)

    tensors = {
        "prompts": nested([row[:prompt] for row, prompt in zip(rows, prompts, strict=True)], torch.int64),
        "responses": nested([row[prompt:] for row, prompt in zip(rows, prompts, strict=True)], torch.int64),
        "input_ids": nested(rows, torch.int64),
        "position_ids": nested([list(range(len(row))) for row in rows], torch.int64),
        "response_mask": nested(masks, torch.int64),
        "loss_mask": nested(masks, torch.int64),
        "old_log_probs": numbers(-6, -5),
        "ref_log_prob": numbers(-6, -5),
        "advantages": numbers(-1, 1),
    }
    about = {"temperature": temperature, "calculate_entropy": True, "use_remove_padding": False}
    return tu.get_tensordict(tensors, about | {"use_dynamic_bsz": False, "global_batch_size": len(rows)})


def compute(worker: SwarmCpuWorker, batch: Any, shared: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient, and log-probabilities and entropy of the sampled tokens."""
    engine = worker.actor.engine
    engine.shared_prefixes = shared
    sampled = batch["response_mask"].values().bool()

    def fresh() -> Any:
        data = batch.clone()
        tu.assign_non_tensor(data, micro_batch_size_per_gpu=1)
        return data

    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(fresh(), worker.actor.loss_fn)
        assert not output["model_output"], "an update keeps no log-probabilities"
        grads = [parameter.grad for parameter in engine.module.parameters()]
        gradient = torch.cat([grad.full_tensor().flatten().double() for grad in grads])
        found = engine.infer_batch(fresh())["model_output"]
    log_probs, entropy = (
        response_from_nested(found[name], batch["response_mask"]).values()[sampled] for name in ("log_probs", "entropy")
    )
    return gradient, log_probs, entropy


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def refused(worker: SwarmCpuWorker) -> bool:
    """Whether an engine notices that its model does not fit a trie; it trains all the same."""
    batch = make_batch([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]], random.Random(0), 1.0)
    gradient, _, _ = compute(worker, batch, True)
    assert gradient.isfinite().all() and gradient.norm() > 0
    saved = worker.actor.engine.take_savings()
    return saved["swarm/tokens"] == saved["swarm/unique_tokens"]


def compare_examples(worker: SwarmCpuWorker, again: SwarmCpuWorker, count: int) -> dict[str, Any]:
    """The ``worst`` figures of ``count`` examples and of one for ``again``, and how many ``parts`` their tries had."""
    worst = {"log_probs": 0.0, "entropy": 0.0, "gradient": 0.0, "cosine": 1.0}
    parts: set[int] = set()
    plan = tree_engine.split

    def split(*args: Any, **kwargs: Any) -> Any:
        found = plan(*args, **kwargs)
        parts.add(len(found))
        return found

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(token_rows, st.integers(1, 4), st.sampled_from([1.0, 0.7]), st.integers(0))
    def examples(rows: list[list[int]], micro: int, temperature: float, seed: int) -> None:
        config = worker.actor.engine.engine_config
        config.micro_batch_size_per_gpu, config.infer_micro_batch_size_per_gpu = micro, micro + 1
        compare(worker, make_batch(rows, random.Random(seed), temperature))

    def compare(worker: SwarmCpuWorker, batch: Any) -> None:
        wanted, found = compute(worker, batch, False), compute(worker, batch, True)
        worst["log_probs"] = max(worst["log_probs"], difference(wanted[1], found[1]))
        worst["entropy"] = max(worst["entropy"], difference(wanted[2], found[2]))
        norm, found_norm = wanted[0].norm(), found[0].norm()
        worst["gradient"] = max(worst["gradient"], float((wanted[0] - found[0]).norm() / norm))
        worst["cosine"] = min(worst["cosine"], float(wanted[0] @ found[0] / (norm * found_norm)))

    tree_engine.split = split
    try:
        examples()
        compare(again, make_batch([[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 7, 8]], random.Random(0), 1.0))
    finally:
        tree_engine.split = plan
    return {"worst": worst, "parts": sorted(parts)}


def main() -> None:
    asked = json.load(sys.stdin)
    folder = Path(asked["folder"])
    os.environ["DIST_INIT_METHOD"] = f"file://{folder / 'ranks'}"
    # torch refuses to compile this backward pass for a CPU, and refuses what it could compute as well
    torch_flex._validate_device = lambda *_: None
    shape = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # larger than usual, so that attention has a say in the logits
        "initializer_range": 0.15,
    }
    worker = make_worker(folder / "plain", LlamaConfig(**shape))
    # the backward pass computes attention again
    checkpointed = {"actor_rollout_ref.model.enable_gradient_checkpointing": True}
    again = make_worker(folder / "again", LlamaConfig(**shape), **checkpointed)
    # so small a model's rows are estimated to cost less, and their tries are what is tested
    tree_engine.part_cost = lambda shape, part: 1e-9
    told: dict[str, Any] = {}
    for way, count in asked["ways"].items():
        attention.ATTEND["cpu"] = getattr(attention, way)
        told[way] = compare_examples(worker, again, count)
    others = {
        "sliding window": AutoConfig.for_model(
            "qwen2", **shape, use_sliding_window=True, sliding_window=2, max_window_layers=0
        ),
        "attention dropout": LlamaConfig(**shape, attention_dropout=0.5),
        "no window": AutoConfig.for_model("qwen2", **shape),
    }
    found = {name: refused(make_worker(folder / name, config)) for name, config in others.items()}
    torch.distributed.destroy_process_group()
    print(json.dumps({"ways": told, "refused": found}))


if __name__ == "__main__":
    main()
