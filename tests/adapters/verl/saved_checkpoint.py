"""Writes a checkpoint as verl's FSDP engine does, of any number of ranks, without processes for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engine import tiny_model

LORA = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}


def build(folder: Path, *, lora: Sequence[str] = ()) -> Any:
    """The tiny model in ``folder``, with weights of its own; or with an adapter of the layers ``lora`` that changes
    them."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model.build(folder))
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=list(lora)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not lora or "lora_" in name:
                weight.add_(torch.randn_like(weight) * 0.05)
    return model


def write(checkpoint: Path, model: Any, described: Path, *, ranks: int = 1, dtype: str = "float32") -> Path:
    """The weights of ``model`` in ``dtype``, as ``ranks`` ranks of FSDP save them, and what verl puts beside them."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig, AutoTokenizer

    actor = checkpoint / "actor"
    actor.mkdir(parents=True)
    for rank in range(ranks):
        torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
            state: dict[str, Any] = {}
            for name, weight in model.state_dict().items():
                # as FSDP cuts: the last ranks may have less, or nothing
                parts = weight.to(getattr(torch, dtype)).chunk(ranks)
                local = parts[rank].clone() if rank < len(parts) else parts[0][:0].clone()
                state[name] = DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride()
                )
            torch.save(state, actor / f"model_world_size_{ranks}_rank_{rank}.pt")
        finally:
            torch.distributed.destroy_process_group()
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    if any("lora_" in name for name in model.state_dict()):
        (actor / "lora_train_meta.json").write_text(json.dumps(LORA))
    config: Any = AutoConfig.from_pretrained(described)
    # verl says so over weights in fp32
    config.dtype = "bfloat16"
    config.save_pretrained(actor / "huggingface")
    AutoTokenizer.from_pretrained(described).save_pretrained(actor / "huggingface")
    (checkpoint / "score.json").write_text(json.dumps({"reward_mean": 0.5, "versions": {"verl": "0.9.1"}}))
    return checkpoint
