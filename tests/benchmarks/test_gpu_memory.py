"""The configurations for GPUs in docs/gpus: their jobs are verl's, and their figures follow from the formulas."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.gpu.memory import MODELS, Shape, memory, of_file
from gateway.config.gateway import read_config
from swarm.job import LoraSettings, TrainJob

FOLDER = Path(__file__).parents[2] / "docs" / "gpus"
FILES = sorted(FOLDER.glob("*.yaml"))


def test_there_is_one_for_each_size() -> None:
    assert [file.name for file in FILES] == ["0.5b.yaml", "1.5b.yaml", "7b-4-gpus.yaml", "7b-lora.yaml"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_figures_in_a_file_are_those_of_the_formulas_and_fit(file: Path) -> None:
    found = of_file(file)
    assert found.fits
    assert [line[4:] for line in file.read_text().splitlines() if line.startswith("# - ")] == found.lines()
    measured = "measured in one step" if file.stem == "1.5b" else "never run on a GPU"
    assert measured in file.read_text().splitlines()[0]


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs the cpu extra")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_right_for_verl_and_the_gateway(file: Path, tmp_path: Path) -> None:
    from adapters.verl.config import serving_mode, verl_config

    sections = yaml.safe_load(file.read_text())
    job = TrainJob.model_validate(sections["job"])
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 32768}))
    config: Any = verl_config(job, str(tmp_path), tmp_path, "cuda")
    actor = config.actor_rollout_ref.actor
    # what the formulas take for granted
    assert (actor.fsdp_config.model_dtype, actor.fsdp_config.dtype) == ("fp32", "bfloat16")
    assert not (actor.fsdp_config.param_offload or actor.fsdp_config.optimizer_offload)
    assert config.actor_rollout_ref.model.enable_gradient_checkpointing
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert actor.ppo_max_token_len_per_gpu >= job.max_model_len
    always = serving_mode(job, config) == "always"
    assert always == (job.serving == "always") and (not always or of_file(file).serves_always)
    read_config(sections["gateway"] | {"swarm_url": "http://127.0.0.1:1"}, where="gateway", folder=tmp_path)


@pytest.mark.slow
def test_weights_are_counted_as_transformers_counts_them() -> None:
    torch = pytest.importorskip("torch", reason="needs the cpu extra")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    for tied in (True, False):
        shape = Shape(64, 3, 32, 160, 500, tied=tied)
        config = Qwen2Config(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=160,
            vocab_size=500,
            tie_word_embeddings=tied,
        )
        with torch.device("meta"):
            model = Qwen2ForCausalLM(config)
        assert sum(one.numel() for one in model.parameters()) == shape.weights
    # as published
    assert [shape.weights for shape in MODELS.values()] == [494_032_768, 1_543_714_304, 7_615_616_512]


def test_more_gpus_share_what_the_trainer_holds_and_lora_holds_less() -> None:
    shape = MODELS["Qwen/Qwen2.5-7B-Instruct"]
    whole = TrainJob(model="m")
    one, four = memory(whole, shape, 80e9), memory(whole.model_copy(update={"n_gpu": 4}), shape, 80e9)
    assert not one.fits, "16 bytes for each of 7.6 billion weights"
    for name in ("weights", "gradients", "adam"):
        assert asdict(one)[name] == 4 * asdict(four)[name]
    assert one.weights + one.gradients + one.adam == 16 * shape.weights
    small: dict[str, Any] = {"actor_rollout_ref": {"actor": {"ppo_max_token_len_per_gpu": 18432}}}
    written = [{"overrides": small}, {"overrides": {"+actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 18432}}]
    for overrides in written:
        assert memory(whole.model_copy(update=overrides), shape, 80e9).logits == 6 * 18432 * shape.vocabulary
    lora = memory(whole.model_copy(update={"lora": LoraSettings(rank=32)}), shape, 80e9)
    assert lora.gradients + lora.adam == 12 * shape.adapter(32) < one.gradients / 20
    assert math.isclose(one.kv_cache, 0.6 * 80e9 - 2 * shape.weights - 2e9)
