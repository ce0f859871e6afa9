"""AgentJet's job YAML as a TrainJob: carried, refused or listed."""

from __future__ import annotations

import logging
from fnmatch import fnmatchcase
from typing import Any

import pytest
import yaml

from swarm.agentjet.yaml_job import convert, read_job
from swarm.errors import ConfigError
from swarm.job import EvalSampling, LoraSettings, TrainJob, dump_job, layered


def composed(**changes: Any) -> dict[str, Any]:
    """What AgentJet's client sends: its defaults in full; ``changes`` are dotted keys below ``ajet`` with ``__``."""
    ajet: dict[str, Any] = {
        "project_name": "ajet_default_project",
        "experiment_name": "read_yaml_name",
        "experiment_dir": "auto",
        "backbone": "verl",
        "model": {"path": "Qwen/Qwen2.5-7B-Instruct"},
        "data": {"max_prompt_length": 3000, "max_response_length": 15000, "train_batch_size": 32},
        "rollout": {
            "user_workflow": "tutorial.example_appworld.appworld->ExampleAgentScopeWorkflow",
            "force_disable_toolcalls": False,
            "vllm_tool_parser": "hermes",
            "chat_template_generate_prompt_type": "default",
            "gamma": 1.0,
            "max_env_worker": 128,
            "num_repeat": 4,
            "compute_madness_checklist": [],
            "agent_madness_termination": True,
            "agent_madness_reward": 0.0,
            "max_response_length_in_one_turn": 4096,
            "max_model_len": 18000,
            "multi_turn": {"max_steps": 30, "expected_steps": 1},
            "tensor_model_parallel_size": 1,
            "n_vllm_engine": 1,
            "max_num_seqs": 64,
            "name": "vllm",
            "gpu_memory_utilization": 0.85,
            "temperature": 0.9,
            "top_p": 1.0,
            "top_k": -1,
            "val_kwargs": {"temperature": 0.0, "do_sample": False},
        },
        "trainer_common": {
            "nnodes": 1,
            "n_gpus_per_node": 8,
            "logger": "tensorboard",
            "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
            "mini_batch_num": 1,
            "fsdp_config": {"param_offload": True, "optimizer_offload": True},
            "optim": {"lr": 1e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "grad_clip": 20.0},
            "use_kl_loss": True,
            "kl_loss_coef": 0.002,
            "kl_loss_type": "low_var_kl",
            "ppo_epochs": 1,
            "loss_extra_scale_ratio": 1.0,
            "save_freq": 20,
            "test_freq": 20,
            "val_before_train": False,
            "val_pass_n": 4,
            "total_epochs": 50,
            "total_training_steps": None,
            "checkpoint_base_dir": "./saved_checkpoints",
            "train_print_to_markdown_file_path": None,
        },
        "teacher_model": {"teacher_opd_enabled": False, "teacher_model_vllm_url": "", "teacher_topk": 0},
        "opd": {"loss_mode": "k1", "distillation_loss_coef": 1.0},
        "lora": {"lora_rank": 0, "lora_alpha": 16, "target_modules": "all-linear", "load_format": "auto"},
        "context_tracker": {"timeline_merging_policy": {"timeline_compare_level": "text", "ignore_tools": True}},
        "task_reader": {"type": "random_dummy"},
        "enable_swarm_mode": True,
        "interchange_server": {"interchange_method": "ipc"},
        "swarm_mode_sample_collection_method": "rollout_until_finish_enough_tasks",
        "swarm_mode_sample_collection_max_cached_episodes": 9999,
    }
    for name, value in changes.items():
        *parents, last = name.split("__")
        section = ajet
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return {"ajet": ajet, "hydra": {}, "defaults": ["_self_"], "actor_rollout_ref": {"actor": {"strategy": "fsdp"}}}


def test_the_clients_default_job_is_carried() -> None:
    job = convert(composed()).job
    assert job == TrainJob(
        model="Qwen/Qwen2.5-7B-Instruct",
        project="ajet_default_project",
        batch_size=32,
        num_repeat=4,
        max_parallel_episodes=128,
        max_prompt_length=3000,
        max_response_length=15000,
        max_turn_length=4096,
        temperature=0.9,
        eval_sampling=EvalSampling(temperature=0.0),
        dialect="agentjet",
        n_gpu=8,
        gpu_memory_utilization=0.85,
        tool_call_parser="hermes",
        lr=1e-6,
        kl_coef=0.002,
        save_freq=20,
        logger=["console", "tensorboard"],
        overrides=job.overrides,
    )
    assert job.overrides == {
        "actor_rollout_ref.rollout.max_num_seqs": 64,
        "actor_rollout_ref.actor.fsdp_config.param_offload": True,
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
        "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
        "actor_rollout_ref.actor.optim.weight_decay": 0.01,
        "actor_rollout_ref.actor.optim.betas": [0.9, 0.999],
        "actor_rollout_ref.actor.optim.clip_grad": 20.0,
    }


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"experiment_name": "mine"}, "experiment", "mine"),
        ({"swarm_mode_sample_collection_method": "rollout_until_finish_enough_episodes"}, "collection", None),
        ({"swarm_mode_sample_collection_max_cached_episodes": 50}, "max_cached_episodes", 50),
        ({"trainer_common__total_training_steps": 7}, "total_training_steps", 7),
        ({"trainer_common__use_kl_loss": False}, "kl_coef", 0.0),
        ({"trainer_common__use_kl_loss": True, "trainer_common__kl_loss_coef": None}, "kl_coef", 0.002),
        ({"trainer_common__logger": "console"}, "logger", ["console"]),
        ({"trainer_common__logger": ["console", "wandb"]}, "logger", ["console", "wandb"]),
        ({"trainer_common__optim__lr": "1e-4"}, "lr", 1e-4),
        ({"rollout__vllm_tool_parser": "qwen3_coder"}, "tool_call_parser", "qwen3_coder"),
        ({"rollout__vllm_tool_parser": None}, "tool_call_parser", "auto"),
        ({"rollout__force_disable_toolcalls": True}, "tool_call_parser", "none"),
        ({"rollout__max_response_length_in_one_turn": 1024}, "max_turn_length", 1024),
        (
            {"rollout__val_kwargs": {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}},
            "eval_sampling",
            EvalSampling(temperature=0.6, top_p=0.9, top_k=20),
        ),
    ],
)
def test_a_changed_key_reaches_its_field(change: dict[str, Any], field: str, value: Any) -> None:
    if field == "collection":
        value = change["swarm_mode_sample_collection_method"].removeprefix("rollout_until_")
    assert getattr(convert(composed(**change)).job, field) == value


@pytest.mark.parametrize(("workers", "slots"), [(4, 4), (30, 28), (127, 124), (128, 128), (5000, 128)])
def test_as_many_slots_as_agentjet_has(workers: int, slots: int) -> None:
    assert convert(composed(rollout__max_env_worker=workers)).job.slots == slots == min(32, workers // 4) * 4


def test_an_adapter_is_ours_and_more_room_is_carried_by_verls_own_keys() -> None:
    lora = {"lora_rank": 32, "lora_alpha": 64, "target_modules": "all-linear"}
    config = composed(rollout__max_model_len=20_000, lora=lora | {"load_format": "safetensors", "layered_summon": True})
    conversion = convert(config)
    assert conversion.job.lora == LoraSettings(rank=32, alpha=64)
    assert conversion.job.overrides["actor_rollout_ref.rollout.load_format"] == "safetensors"
    assert conversion.job.overrides["actor_rollout_ref.rollout.layered_summon"] is True
    assert "ajet.lora.*" not in conversion.ignored
    assert conversion.job.overrides["actor_rollout_ref.rollout.max_model_len"] == 20_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"backbone": "trinity", "rollout__name": "x"},
            "ajet.backbone cannot be 'trinity'.*; ajet.rollout.name cannot",
        ),
        ({"enable_swarm_mode": False}, "ajet.enable_swarm_mode cannot be False"),
        ({"rollout__name": "sglang"}, "ajet.rollout.name cannot be 'sglang'"),
        ({"rollout__top_p": 0.9}, "ajet.rollout.top_p cannot be 0.9: .*untruncated"),
        ({"rollout__gamma": 0.9}, "ajet.rollout.gamma cannot be 0.9"),
        ({"rollout__force_disable_toolcalls": "no"}, "ajet.rollout.force_disable_toolcalls cannot be 'no'"),
        (
            {"teacher_model__teacher_opd_enabled": True},
            "ajet.opd.loss_mode, ajet.teacher.*teacher",
        ),
        ({"teacher_model": {"teacher_model_name": "big"}}, "ajet.teacher_model.teacher_model_name: nothing is"),
        ({"teacher_model": {}, "opd__loss_mode": "k3"}, "ajet.opd.loss_mode: nothing is distilled"),
        ({"trainer_common__algorithm": {"adv_estimator": "gae"}}, "ajet.trainer_common.algorithm.adv_estimator: "),
        ({"trainer_common__loss_extra_scale_ratio": 2.0}, "loss_extra_scale_ratio cannot be 2.0"),
        ({"swarm_mode_sample_collection_method": "finish_enough_tasks"}, "known are rollout_until_finish_enough_ep"),
        ({"rollout__max_model_len": 17_999}, "max_model_len cannot be 17999.* together are 18000"),
        ({"rollout__num_repeat": 1}, "ajet.rollout.num_repeat: .*at least 2"),
        ({"rollout__max_env_worker": 3}, r"ajet\.rollout\.max_env_worker must be at least ajet\.rollout\.num_repeat"),
        ({"rollout__max_env_worker": "many"}, r"ajet\.rollout\.max_env_worker: "),
        ({"trainer_common__mini_batch_num": 5}, r"ajet\.data\.train_batch_size must be divisible by ajet\.trainer"),
        ({"lora": {"lora_rank": -1}}, r"ajet\.lora\.lora_rank: must be at least 1"),
        ({"lora": {"lora_rank": 8, "target_modules": 3}}, r"ajet\.lora\.target_modules: "),
        ({"model": {"path": None}}, r"ajet\.model\.path: is required"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_agentjets_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(composed(**change))


def test_what_is_ignored_is_listed_with_its_reason() -> None:
    ignored = convert(composed(rollout__brand_new=1)).ignored
    assert ignored["ajet.rollout.brand_new"] == "not known here"
    assert ignored["ajet.context_tracker.*"] == "timelines are merged where their token ids agree"
    assert "ajet.trainer_common.val_*" in ignored
    assert "actor_rollout_ref" in ignored
    assert {"ajet.teacher_model.*", "ajet.opd.*", "ajet.rollout.user_workflow"} <= set(ignored)
    assert not {"hydra", "defaults", "ajet.model.path"} & set(ignored)
    of_lora = convert(composed(lora={"lora_rank": 8, "lora_adapter_path": "earlier"})).ignored
    assert of_lora["ajet.lora.lora_adapter_path"] == "not known here" and "ajet.lora.*" not in of_lora


def test_a_key_that_is_not_known_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    read_job(yaml.safe_dump(composed()))
    assert caplog.text == ""
    read_job(yaml.safe_dump(composed(rollout__brand_new=1)))
    assert "ajet.rollout.brand_new" in caplog.text and "ajet.context_tracker" not in caplog.text


def leaves(section: dict[str, Any], *above: str) -> list[tuple[str, ...]]:
    return [
        path
        for name, value in section.items()
        for path in (leaves(value, *above, name) if isinstance(value, dict) else [(*above, name)])
    ]


@pytest.mark.parametrize("path", leaves(composed()["ajet"]), ids="__".join)
def test_no_key_gets_lost(path: tuple[str, ...]) -> None:
    """Another value of any key is refused, changes the job, or was listed as ignored."""
    whole = convert(composed())
    try:
        changed = convert(composed(**{"__".join(path): "something else"}))
    except ConfigError:
        return
    key = "ajet." + ".".join(path)
    listed = any(fnmatchcase(key, pattern) for pattern in changed.ignored)
    assert (changed.job != whole.job) != listed, key


def test_either_form_is_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert layered(read_job(yaml.safe_dump(composed())).fields).job == convert(composed()).job
    assert "ajet.context_tracker.*" in caplog.text
    ours = TrainJob(model="tiny", project="ajet_default_project")
    assert layered(read_job(dump_job(ours)).fields).job == ours


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ajet: [", "not valid YAML"),
        ("ajet: 2024-13-45", "not valid YAML"),
        ("ajet: 3", "ajet must be a mapping, got int"),
        ("- ajet", "must be a mapping, got list"),
        ("model: 2024-13-45", "not valid YAML"),
    ],
)
def test_what_is_no_job_says_so(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layered(read_job(text).fields)
