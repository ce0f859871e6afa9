"""Rows one after another in one row, as GPUs without flash attention compute them: each as if it were alone; and what a
model computes in an update as where it samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapters.verl.config import CAPPED_TYPES, PACKED_TYPES, verl_config
from swarm.job import TrainJob

torch = pytest.importorskip("torch", reason="needs the cpu extra")

ROWS = ([5, 9, 3, 17, 40, 2, 8, 77], [11, 4, 60, 21, 30], [7])
#: as small as a model of its type can be; windows are shorter than the rows
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "ffn_dim": 64,
    "word_embed_proj_dim": 64,
}


def apart(kind: str) -> float:
    """The largest difference of the logits of rows that are packed from those of each row alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    packed = torch.tensor([[token for row in ROWS for token in row]])
    positions = torch.tensor([[place for row in ROWS for place in range(len(row))]])
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([row]), use_cache=False).logits[0] for row in ROWS])
        together = model(packed, position_ids=positions, attention_mask=None, use_cache=False).logits[0]
    return float((together - alone).abs().max())


@pytest.mark.parametrize("kind", sorted(PACKED_TYPES))
def test_a_packed_row_is_computed_as_if_it_were_alone(kind: str) -> None:
    assert apart(kind) < 1e-5


def test_rows_that_a_model_mixes_are_noticed() -> None:
    assert apart("opt") > 1e-3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", CAPPED_TYPES)
def test_a_cap_on_the_scores_of_attention_is_computed(kind: str, device: Any, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    described = AutoConfig.for_model(kind, **SIZES, attn_logit_softcapping=1.0, initializer_range=0.5)
    described.save_pretrained(tmp_path)
    job = TrainJob(model=str(tmp_path), max_prompt_length=64, max_response_length=64)
    chosen = verl_config(job, job.model, tmp_path, device).actor_rollout_ref.model.override_config

    def logits(attention: str) -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(described, attn_implementation=attention).eval()
        with torch.no_grad():
            return model(torch.tensor([ROWS[0]]), use_cache=False).logits

    assert (logits("sdpa") - logits("eager")).abs().max() > 0.1, "the cap shows"
    assert (logits(chosen.get("attn_implementation", "eager")) - logits("eager")).abs().max() < 1e-6


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_an_update_drops_nothing_that_what_samples_keeps(kind: str, device: Any, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    described = AutoConfig.for_model(kind, **SIZES, n_embd=64, n_head=4, n_layer=2)
    described.save_pretrained(tmp_path)
    job = TrainJob(model=str(tmp_path), max_prompt_length=64, max_response_length=64)
    chosen = dict(verl_config(job, job.model, tmp_path, device).actor_rollout_ref.model.override_config)
    attention = chosen.pop("attn_implementation", "sdpa")

    def apart() -> float:
        model = AutoModelForCausalLM.from_config(described, attn_implementation=attention).train()
        first, second = (model(torch.tensor([ROWS[0]]), use_cache=False).logits for _ in range(2))
        return float((first - second).detach().abs().max())

    assert apart() > 1e-4, "its own settings drop"
    # as verl does
    for name, value in chosen.items():
        setattr(described, name, value)
    assert apart() == 0
