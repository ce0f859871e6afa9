"""From a ``TrainJob`` to verl's configuration, without importing verl, torch or Ray.

Invariant: verl's defaults < what the job implies < the device's needs < ``job.overrides``; an override of a key that
verl does not have is an error, never a silent no-op.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from adapters.verl import INSTALL
from adapters.verl.advantage import advantage_values
from adapters.verl.cpu import CPU_BUILD, cpu_values, version_of
from adapters.verl.lora import lora_values
from adapters.verl.parsers import VLLM, check_parsers, parser_values, read_object
from swarm.checkpoints import checkpoint_folder
from swarm.errors import ConfigError
from swarm.job import ServingMode, TrainJob
from swarm.packs import installed

Device = Literal["cpu", "cuda"]

ROLLOUT = "actor_rollout_ref.rollout"

#: Types of models that keep the rows of a packed micro-batch apart with torch's own attention: transformers makes a
#: mask for them by the positions. Others mix the rows, without an error (recurrent layers, masks of a model's own).
PACKED_TYPES = (
    *("gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
)

#: Types of models that cap the scores of their attention: torch's own computes them without the cap, and says nothing.
CAPPED_TYPES = ("gemma2", "vaultgemma")

#: Types of models that read pictures, of which verl computes no row of text: it wants the positions of a picture.
_PICTURE_TYPES = ("glm4v", "qwen2_vl", "qwen2_5_vl")

#: Keys of verl that the swarm server knows as fields of the job: it tells vLLM how to sample, counts by sizes, and
#: looks for checkpoints, which go on with as many ranks only.
_OF_THE_SERVER = {
    "actor_rollout_ref.model.path": "model",
    f"{ROLLOUT}.n": "num_repeat",
    f"{ROLLOUT}.temperature": "temperature",
    **dict.fromkeys((f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k"), "sampling"),
    "data.train_batch_size": "batch_size",
    **dict.fromkeys(("data.max_prompt_length", f"{ROLLOUT}.prompt_length"), "max_prompt_length"),
    **dict.fromkeys(("data.max_response_length", f"{ROLLOUT}.response_length"), "max_response_length"),
    "trainer.default_local_dir": "checkpoint_dir",
    "trainer.total_training_steps": "total_training_steps",
    "trainer.n_gpus_per_node": "n_gpu",
    "trainer.nnodes": "nnodes",
    f"{ROLLOUT}.tensor_model_parallel_size": "tensor_parallel_size",
}

#: Estimators of verl that its trainer gives too little, so that the first step, or a later one, would fail.
_LACKING = {
    "remax": "the reward of a greedy answer",
    "gdpo": "the parts of each reward",
    # a row that fills a batch up is one, too
    "grpo_passk": "a second row where a group has one",
    **dict.fromkeys(("optimal_token_baseline", "tir_optimal_token_baseline"), "the squares of all probabilities"),
}

#: Tokens per micro-batch on a GPU: verl packs rows up to this many (a whole row always fits).
MIN_MICRO_BATCH_TOKENS = 16384


def resolve_device(job: TrainJob) -> Device:
    """The device a job runs on; ``auto`` is CUDA where the NVIDIA driver shows a GPU, and vLLM's build for CPUs is not
    what is installed."""
    if job.device == "auto":
        shown = any(Path("/proc/driver/nvidia/gpus").glob("*")) or Path("/dev/nvidia0").exists()
        return "cuda" if shown and version_of(CPU_BUILD) is None else "cpu"
    return job.device


def verl_config(job: TrainJob, model: str, run_dir: Path, device: Device) -> DictConfig:
    """verl's full configuration for ``job``, with its ``model`` resolved to a path or hub name, and its ``device``.

    Raises:
        ConfigError: verl or a pack that the job needs is not installed, an override names no key of verl or does not
            fit it, vLLM has no such parser, or an episode may be longer than the model's context.
    """
    config = copy.deepcopy(_defaults())
    values = {**implied_values(job, model, run_dir, device), **parser_values(job, model)}
    # our own keys may be absent from verl's YAML where its dataclasses have them
    for key, value in values.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    apply_overrides(config, job.overrides)
    for key, name in (_OF_THE_SERVER | dict.fromkeys(lora_values(job), "lora")).items():
        if OmegaConf.select(config, key) != values.get(key, getattr(job, name)):
            raise ConfigError(
                f"overrides: the swarm server goes by job.{name}, too: set that in place of {key}", param=key
            )
    for key in (f"{ROLLOUT}.max_model_len", "trainer.save_freq"):
        # `TrainJob` reads them, too, and as they are written
        setting = job.flat_overrides.get(key)
        value = setting if isinstance(setting, str) else OmegaConf.select(config, key)
        if not isinstance(value, int):
            raise ConfigError(f"overrides: {key} is {value!r}, and must be a whole number, or be left out", param=key)
    if (key := "trainer.resume_mode") in job.flat_overrides:
        raise ConfigError(
            f"overrides: {key} would decide after a death of the engine, too, when the run has to go on from its own "
            "last checkpoint: leave it out, for `up` and `train` set job.resume (`policies fork` begins with the "
            "checkpoint of another run)",
            param=key,
        )
    try:
        for fault in _faults(config, job):
            raise ConfigError(f"overrides: {fault}")
        check_parsers(OmegaConf.select(config, VLLM))
        _check_model(read_object(model, "config.json"), model, OmegaConf.select(config, f"{ROLLOUT}.max_model_len"))
    except (AttributeError, TypeError) as exc:
        if not job.overrides:
            raise
        names = ", ".join(job.overrides)
        raise ConfigError(f"overrides: {names}: a value is of another kind than verl's own: {exc}") from exc
    return config


def implied_values(job: TrainJob, model: str, run_dir: Path, device: Device) -> dict[str, Any]:
    """What a job implies on ``device``, but for parsers, as dotted verl keys; arguments as of :func:`verl_config`."""
    values = job_values(job, model, run_dir) | (cpu_values(job, model) if device == "cpu" else cuda_values(job, model))
    key, described = "actor_rollout_ref.model.override_config", read_object(model, "config.json")
    if key in values and described.get("model_type") in CAPPED_TYPES:
        values[key] = {"attn_implementation": "eager"}
    # an update with dropout would be of other probabilities than those that were sampled
    if drops := _no_dropout(described):
        values[key] = values.get(key, {}) | drops
    # our own keys, which trainer and worker read
    values["trainer.keep_checkpoints"], values["trainer.keep_gb"] = job.keep_checkpoints, job.keep_gb
    values["trainer.sampling"] = job.sampling
    values["actor_rollout_ref.shared_prefixes"] = _shares_prefixes(job, device)
    if job.serving == "always":
        values |= {f"{ROLLOUT}.free_cache_engine": False, f"{ROLLOUT}.enable_sleep_mode": False}
    return values


def _no_dropout(described: Mapping[str, Any]) -> dict[str, Any]:
    """Zeros for all dropout in a model's settings, and in those of its text."""
    drops: dict[str, Any] = dict.fromkeys(
        (name for name, value in described.items() if "drop" in name and isinstance(value, float) and value), 0.0
    )
    of_text = described.get("text_config")
    if isinstance(of_text, dict) and (nested := _no_dropout(of_text)):
        drops["text_config"] = nested
    return drops


def _shares_prefixes(job: TrainJob, device: Device) -> bool:
    if installed("shared_prefixes"):
        return job.shared_prefixes == "on" or (job.shared_prefixes == "auto" and device == "cpu")
    if job.shared_prefixes == "on":
        raise ConfigError(
            "job.shared_prefixes: on needs the pack of shared prefixes (adapters/verl/tree), which is not installed "
            "here; leave it out, or say off"
        )
    return False


def serving_mode(job: TrainJob, config: DictConfig) -> ServingMode:
    """When episodes run under ``job``, whose configuration is ``config``; decides what ``auto`` means."""
    if job.serving != "auto":
        return job.serving
    sleeps = OmegaConf.select(config, f"{ROLLOUT}.free_cache_engine")
    return "between_steps" if sleeps or job.max_staleness == 0 else "always"


def as_plain(config: DictConfig) -> dict[str, Any]:
    """``config`` with every reference resolved, as plain JSON data."""
    plain: Any = OmegaConf.to_container(config, resolve=True)
    return plain


def as_told(config: DictConfig) -> dict[str, Any]:
    """:func:`as_plain` for others than the engine: environment variables, which may be secrets, stay references.

    That holds for values too that refer to such a value. Not for several threads at once.
    """
    OmegaConf.register_new_resolver("oc.env", _reference_to_variable, replace=True)
    try:
        return as_plain(config)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _reference_to_variable(*arguments: Any) -> str:
    return f"${{oc.env:{','.join('null' if argument is None else str(argument) for argument in arguments)}}}"


@functools.cache
def _defaults() -> DictConfig:
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ConfigError(f"verl is not installed: {INSTALL}")
    # hydra warns about a missing _self_ in files that are verl's
    logging.getLogger("hydra").setLevel(logging.ERROR)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(spec.origin).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer")


def job_values(job: TrainJob, model: str, run_dir: Path) -> dict[str, Any]:
    """What a job implies on every device, as dotted verl keys."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        **advantage_values(job),
        **lora_values(job),
        # Groups left over from a step are trained in the next one, by a newer policy than sampled them. verl recomputes
        # the old log-probabilities, so its ratio does not see that: weigh each token by the recomputed over the sampled
        # probability, at most 2. With bypass_mode the ratio itself is against the sampling policy and verl's v1 trainer
        # computes no weights.
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": 2.0,
        "actor_rollout_ref.model.path": model,
        # the place-holder dataset reads its length from here
        "data.train_files": [job.batch_size * job.total_training_steps],
        "data.val_files": [1],
        "data.custom_cls.path": "pkg://adapters.verl.feed",
        "data.custom_cls.name": "SwarmPrompts",
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,
        "data.train_batch_size": job.batch_size,
        "data.max_prompt_length": job.max_prompt_length,
        "data.max_response_length": job.max_response_length,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": job.batch_size // job.mini_batch_num,
        f"{actor}.ppo_epochs": job.ppo_epochs,
        f"{actor}.data_loader_seed": job.seed,
        f"{actor}.fsdp_config.seed": job.seed,
        f"{actor}.optim.lr": job.lr,
        f"{actor}.use_kl_loss": job.kl_coef > 0,
        f"{actor}.kl_loss_coef": job.kl_coef,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": job.num_repeat,
        f"{rollout}.seed": job.seed,
        f"{rollout}.temperature": job.temperature,
        f"{rollout}.top_p": 1.0,
        f"{rollout}.top_k": -1,
        f"{rollout}.max_model_len": job.max_prompt_length + job.max_response_length,
        f"{rollout}.tensor_model_parallel_size": job.tensor_parallel_size,
        f"{rollout}.gpu_memory_utilization": job.gpu_memory_utilization,
        # the weights come over the first weight sync; until then vLLM has the model's own
        f"{rollout}.load_format": "auto",
        f"{rollout}.engine_kwargs.vllm.worker_extension_cls": "adapters.verl.vllm_extension.SwarmWorkerExtension",
        f"{rollout}.engine_kwargs.vllm.served_model_name": job.model_name,
        f"{rollout}.engine_kwargs.vllm.enable_prompt_tokens_details": True,
        # it asks for no key, and by itself lets every page in a browser of this machine use it
        f"{rollout}.engine_kwargs.vllm.allowed_origins": "[]",
        # no limit on the rows of a batch: a trajectory may have any number of timelines, and a full queue would
        # end the run at every attempt to train the batch
        "transfer_queue.backend.SimpleStorage.total_storage_size": None,
        # rewards come with the batch: verl's own reward workers would only load torch once more
        "reward.num_workers": 0,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": job.total_training_steps,
        "trainer.project_name": job.project,
        "trainer.experiment_name": job.experiment,
        "trainer.logger": list(job.logger),
        "trainer.nnodes": job.nnodes,
        "trainer.n_gpus_per_node": job.n_gpu,
        "trainer.save_freq": job.save_freq,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "auto" if job.resume else "disable",
        "trainer.default_local_dir": str(checkpoint_folder(job, run_dir).absolute()),
    }


def cuda_values(job: TrainJob, model: str) -> dict[str, Any]:
    """What GPUs need beyond verl's own defaults (bf16, flash attention, vLLM asleep while the trainer computes).

    Where flash attention is not installed, torch's own attention computes the rows of a micro-batch as one, if the
    model keeps them apart. Otherwise they are padded to the longest of them: short rows beside a long one then take
    many times the tokens that a micro-batch may have.
    """
    actor = "actor_rollout_ref.actor"
    tokens = max(MIN_MICRO_BATCH_TOKENS, job.max_prompt_length + job.max_response_length)
    values: dict[str, Any] = {
        "trainer.device": "cuda",
        f"{actor}.use_dynamic_bsz": True,
        # verl takes the limits for old and reference log-probabilities from it
        f"{actor}.ppo_max_token_len_per_gpu": tokens,
    }
    if importlib.util.find_spec("flash_attn") is None:
        # verl asks for it by default, but its extra `vllm` does not bring it
        values["actor_rollout_ref.model.override_config"] = {"attn_implementation": "sdpa"}
        packed = read_object(model, "config.json").get("model_type") in PACKED_TYPES
        values["actor_rollout_ref.model.use_remove_padding"] = packed
    return values


def apply_overrides(config: DictConfig, overrides: Mapping[str, Any]) -> None:
    """Set verl keys by their dotted names; a leading ``+`` adds a key that verl's YAML does not list.

    Raises:
        ConfigError: names the key that does not exist (with the nearest that do) or the value that does not fit.
    """
    for name, value in overrides.items():
        key = name.lstrip("+")
        if "[" in key or key.startswith("."):
            # OmegaConf takes a[b] and .a.b for a.b; those who read a job's overrides do not
            raise ConfigError(f"overrides: {name}: write its parts with dots, as in a.b", param=name)
        parent, _, last = key.rpartition(".")
        try:
            holder: Any = OmegaConf.select(config, parent) if parent else config
            # `in` is False for ??? values
            exists = isinstance(holder, DictConfig) and last in list(holder.keys())
            if not exists and not name.startswith("+"):
                near = difflib.get_close_matches(key, dict(dotted_items(config)), n=3, cutoff=0.6)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise ConfigError(f"overrides: verl has no key {key!r}{hint} (a leading + adds a new key)", param=key)
            OmegaConf.update(config, key, value, merge=True, force_add=name.startswith("+"))
        except (OmegaConfBaseException, ValueError, TypeError) as exc:
            raise ConfigError(f"overrides: {key!r} cannot be {value!r}: {str(exc).splitlines()[0]}", param=key) from exc


def dotted_items(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings, by their dotted keys; a mapping without items is a value."""
    for name in node.keys():  # noqa: SIM118 - in a DictConfig, iteration leaves out ??? values
        child = node._get_node(name) if isinstance(node, DictConfig) else node[name]
        # one that is missing, or refers to another, has no length
        if isinstance(child, DictConfig | dict) and child:
            yield from dotted_items(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _faults(config: DictConfig, job: TrainJob) -> Iterator[str]:
    """What a step would fail of, at its start or at some batch, and what nobody computes here."""
    trainer, algorithm, data = config.trainer, config.algorithm, config.data
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    if trainer.test_freq > 0 or trainer.val_before_train:
        yield (
            "trainer.test_freq and trainer.val_before_train must stay off: evaluation runs as eval episodes of the "
            "swarm, not inside verl"
        )
    if trainer.v1.trainer_mode != "sync":
        yield "trainer.v1.trainer_mode must stay 'sync', the only mode that the swarm drives"
    if OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.async_save"):
        yield (
            "actor_rollout_ref.actor.checkpoint.async_save is for verl's Megatron engine: with ours, no checkpoint "
            "would be one to go on from"
        )
    for key in (f"actor_rollout_ref.actor.checkpoint.{name}_contents" for name in ("save", "load")):
        if (contents := OmegaConf.select(config, key)) is not None and "model" not in contents:
            yield f"{key} must have 'model': a run that goes on has its weights from there"
    if (estimator := algorithm.adv_estimator) in _LACKING:
        yield f"algorithm.adv_estimator {estimator!r} needs {_LACKING[estimator]}, and gets none here"
    if OmegaConf.select(config, "algorithm.filter_groups.enable"):
        yield (
            "algorithm.filter_groups would filter nothing, as the swarm server chooses the groups: set job.collection "
            "to finish_enough_non_dummy_tasks in place of it"
        )
    # the first is of verl's Megatron engine: ours would train all weights, and keep no reference for the KL loss
    if not model.lora_rank and (OmegaConf.select(model, "lora.rank") or model.lora_adapter_path):
        yield "lora.rank and lora_adapter_path alone train no adapter here: declare it by job.lora"
    if config.critic.enable or estimator == "gae":
        yield "critic.enable and algorithm.adv_estimator 'gae' need a critic, which is not trained here"
    if job.serving == "always" and OmegaConf.select(config, f"{ROLLOUT}.free_cache_engine"):
        yield (
            f"{ROLLOUT}.free_cache_engine puts vLLM to sleep while the trainer computes: that needs "
            "serving: between_steps"
        )
    if not 1 <= (tasks := actor.ppo_mini_batch_size) <= data.train_batch_size:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size is {tasks} tasks, and must be from 1 to batch_size "
            f"({data.train_batch_size})"
        )
    for name in () if actor.use_dynamic_bsz else ("actor.ppo", "rollout.log_prob", "ref.log_prob"):
        key = f"actor_rollout_ref.{name}_micro_batch_size_per_gpu"
        if (size := OmegaConf.select(config, key)) is not None and size < 1:
            yield f"{key} is {size}, and must be at least 1 row"


def _check_model(described: Mapping[str, Any], model: str, longest: int) -> None:
    """Refuse a model that verl does not train on text, and episodes that are longer than its context; vLLM would refuse
    these, after a minute of boot. A context that scaled rotary embeddings stretch is left to vLLM."""
    if (kind := described.get("model_type")) in _PICTURE_TYPES:
        raise ConfigError(
            f"{model} is of the type {kind}, which verl trains on pictures alone, and what is trained here is text: "
            "name a model that reads text",
            param="model",
        )
    context = described.get("max_position_embeddings")
    stretched = "factor" in json.dumps([described.get("rope_scaling"), described.get("rope_parameters")])
    if context and longest > context and not stretched:
        raise ConfigError(
            f"max_prompt_length and max_response_length are {longest:,} tokens together, and the model takes "
            f"{context:,}: set both in the job",
            param="max_prompt_length",
        )
