"""``TrainJob``: the small configuration of one training run, from which the engine's own configuration is mapped; and
a job from layers of settings, with where each value comes from.

Invariant: ``set`` (keywords, ``--set``) > the job's YAML > the server's defaults > the defaults here > verl's defaults.
Of ``overrides`` each key of verl is a value of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import to_jsonable_python

from swarm.errors import ConfigError
from swarm.packs import added
from swarm.types import Model
from swarm.validation import parse_mapping, read_mapping, validated

#: Where a value comes from, the strongest first; then :data:`OURS` and verl.
SET, JOB, SERVER = "set", "job", "server defaults"
OURS, VERL = "swarm-gateway", "verl"
LAYERS = (SET, JOB, SERVER)

#: AgentJet's names of fields.
SPELLINGS = {"algorithm": "advantage", "project_name": "project", "experiment_name": "experiment"}

#: When a batch is complete, by AgentJet's names without their common beginning ``rollout_until_``.
CollectionMethod = Literal[
    "finish_enough_episodes",
    "finish_enough_tasks",
    "finish_enough_non_dummy_tasks",
    "any_client_agree_sync_weight",
    "all_clients_agree_sync_weight",
]


#: When episodes run: also while the trainer computes a step, or only between steps.
ServingMode = Literal["always", "between_steps"]


#: Whose clients a job was written for.
Dialect = Literal["swarm-gateway", "agentjet"]


class EvalSampling(Model):
    """How eval episodes sample where their client does not say; ``None``: as vLLM does by default."""

    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1)


def switch(value: object) -> object:
    """The words ``on`` and ``off``, which YAML reads as true and false."""
    return ("on" if value else "off") if isinstance(value, bool) else value


class LoraSettings(Model):
    """An adapter that is trained in place of all weights."""

    rank: int = Field(ge=1, le=512, description="inner width of the two matrices that are added to a layer")
    alpha: int = Field(default=16, ge=1, description="their product counts alpha / rank times")
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear", description="the layers, such as [q_proj, v_proj]; all-linear: all but the output"
    )


#: How the rewards of a group become advantages; the formulas and their sources are in ``adapters/verl/advantage.py``.
Advantage = Literal["grpo", "dr_grpo", "rloo"]


#: Of a job, and of models that hold one: JSON has no form for an infinity in its overrides, and its text is read back.
INFINITIES = ConfigDict(ser_json_inf_nan="strings")
#: A number that YAML 1.1 takes for a text, and the YAML of verl and Hydra does not; or one of ``set``, sent as JSON.
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+|-?Infinity|NaN")


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_numbers(member) for name, member in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_with_numbers(member) for member in cast("list[Any]", value)]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _as_read_back(overrides: dict[str, Any]) -> dict[str, Any]:
    """As :func:`dump_job` writes them: a date as its text, say; else a job would not equal what it was sent as."""
    return _with_numbers(to_jsonable_python(overrides))


def flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by their dotted keys; an empty mapping is a value."""
    values: dict[str, Any] = {}
    for name, value in node.items():
        if isinstance(value, dict) and value:
            values |= flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


class TrainJob(Model):
    """One training run.

    Lengths are in tokens. ``overrides`` are verl keys (``"actor_rollout_ref.actor.clip_ratio": 0.3``), applied last.
    """

    model_config = INFINITIES

    model: str = Field(min_length=1, description="local path, hub name, or a name known to `models pull`")
    served_model_name: str = Field(default="", description="name in /v1/models; default: last part of `model`")
    project: str = Field(default="swarm-gateway", description="in verl's loggers")
    experiment: str = Field(default="default", description="name of the run there")
    advantage: Advantage = Field(
        default="grpo",
        description="of an episode with reward r in a group of N, over its tokens: grpo (r - mean) / std; "
        "dr_grpo r - mean, with the loss summed over tokens; rloo r - mean of the N - 1 others",
    )
    batch_size: int = Field(default=32, ge=1, description="tasks per training step (B)")
    num_repeat: int = Field(default=4, ge=2, description="episodes per task (N)")
    collection: CollectionMethod = Field(
        default="finish_enough_tasks",
        description="a batch is complete with: B*N episodes; B tasks of N episodes; B such tasks whose rewards differ; "
        "or whatever there is once any client, or every active client, agrees",
    )
    max_staleness: int | None = Field(
        default=1,
        ge=0,
        description="weight syncs that surplus and partial groups outlive before they are dropped; 0: dropped at the "
        "next sync, null: never",
    )
    serving: Literal["auto"] | ServingMode = Field(
        default="auto",
        description="always: episodes run on while the trainer computes a step, and pause only while weights are "
        "transferred, which takes time from a trainer on the same cores and memory of its GPU; between_steps: none "
        "runs meanwhile; auto: always where vLLM stays awake (on CPUs, and on GPUs with "
        "actor_rollout_ref.rollout.free_cache_engine=false) and max_staleness allows it, else between_steps",
    )
    max_cached_episodes: int = Field(
        default=9999,
        ge=1,
        description="finished and running episodes together; beyond it claims wait, or the oldest incomplete group is "
        "dropped if no batch is in sight. Never less than one batch and all slots",
    )
    batch_attempts: int = Field(
        default=3, ge=1, description="a batch on which the trainer fails so often is dropped instead of tried again"
    )
    max_parallel_episodes: int | None = Field(default=None, ge=1, description="concurrent episodes; default B*N")
    max_prompt_length: int = Field(
        default=3000, ge=1, description="with max_response_length it is what the model takes, a conversation included"
    )
    max_response_length: int = Field(default=15000, ge=1, description="no answer is longer")
    max_turn_length: int | None = Field(
        default=None,
        ge=1,
        description="tokens of one answer in an episode, at most. So many stay free for it: a prompt that leaves less "
        "is too long, unless the call asks for fewer; default: what the prompt leaves, up to max_response_length",
    )
    temperature: float = Field(default=1.0, gt=0.0, le=2.0, description="of every train episode")
    sampling: Literal["trainer", "app"] = Field(
        default="trainer",
        description="train episodes sample at `temperature` with top_p=1, top_k=-1, or keep what the app asked for",
    )
    eval_sampling: EvalSampling = Field(
        default=EvalSampling(), description="of eval episodes, where their calls leave it open"
    )
    post_rolling_timeout: float | None = Field(
        default=None, ge=0, description="seconds; in place of the server's setting of that name"
    )
    dialect: Dialect = Field(
        default="swarm-gateway",
        description="agentjet: a job that was read from AgentJet's form. A step then waits for running episodes as "
        "long as their own timeouts allow, and a prompt that is too long gets an answer that says so, not a 400",
    )
    lr: float = Field(default=1e-6, gt=0.0, description="learning rate; an adapter needs a higher one, such as 1e-4")
    lora: LoraSettings | None = Field(
        default=None, description="train an adapter (LoRA) and keep the weights; null: train all weights"
    )
    mini_batch_num: int = Field(
        default=1, ge=1, description="optimizer steps per training step; fewer where a batch has fewer rows"
    )
    ppo_epochs: int = Field(default=1, ge=1, description="times that a batch is gone through")
    shared_prefixes: Annotated[Literal["auto", "on", "off"], BeforeValidator(switch)] = Field(
        default="auto",
        description="on: a prefix that rows share (the prompt of a group, a conversation) is computed once where that "
        "is estimated to cost less; off: once for each row; auto: on where it was measured, which is on CPUs",
    )
    kl_coef: float = Field(default=0.0, ge=0.0, description="weight of the KL loss against the first weights")
    total_training_steps: int = Field(default=100_000, ge=1, description="after these the run is done")
    serve_after_training: bool = Field(
        default=False, description="serve the last weights on, untrained, until the engine is stopped"
    )
    save_freq: int = Field(
        default=10, ge=-1, description="checkpoint every so many steps, and after the last; -1: never"
    )
    keep_checkpoints: int = Field(
        default=2,
        ge=1,
        description="how many of the latest; the best one and those promoted or pinned stay beside them",
    )
    keep_gb: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="disk budget of all checkpoints, in GB: beyond it the oldest of the latest go too. The very "
        "latest, the best and those promoted or pinned stay, and one more comes beside them while it is written",
    )
    checkpoint_dir: str | None = Field(default=None, description="default: inside the run folder")
    resume: bool = Field(
        default=False, description="go on from the last checkpoint; `up` and `train` see to that by themselves"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda where the server's machine has a GPU"
    )
    n_gpu: int = Field(default=1, ge=1, description="accelerators per node (on a CPU: 1)")
    nnodes: int = Field(default=1, ge=1, description="nodes of a Ray cluster; 1: this machine")
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs of one replica of vLLM")
    gpu_memory_utilization: float = Field(default=0.6, gt=0.0, lt=1.0, description="vLLM's share of each GPU's memory")
    tool_call_parser: str = Field(
        default="auto",
        min_length=1,
        description="vLLM's parser that makes tool calls of what the model writes: its name, auto (by the model's chat "
        "template), or none: then requests that let the model call tools are refused",
    )
    reasoning_parser: str = Field(
        default="auto",
        min_length=1,
        description="vLLM's parser that takes reasoning out of the text into a field of its own: its name, auto (by "
        "the model's family and chat template), or none",
    )
    logger: list[str] = Field(default=["console"], description="verl loggers: console, tensorboard, wandb, ...")
    # numpy, by which vLLM draws, takes no other
    seed: int = Field(default=0, ge=0, lt=2**31, description="of the trainer, and of the order of tasks")
    overrides: Annotated[dict[str, Any], AfterValidator(_as_read_back)] = Field(
        default={}, description="keys of verl, applied last"
    )

    @model_validator(mode="before")
    @classmethod
    def _agentjets_spellings(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        for theirs, ours in SPELLINGS.items():
            if theirs in fields and ours in fields:
                raise ValueError(f"{theirs} and {ours} are the same field: give one of them")
        return {SPELLINGS.get(name, name): value for name, value in fields.items()}

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.max_parallel_episodes is not None and self.max_parallel_episodes < self.num_repeat:
            raise ValueError("max_parallel_episodes must be at least num_repeat, or no group could ever run")
        if self.batch_size % self.mini_batch_num:
            raise ValueError("batch_size must be divisible by mini_batch_num")
        if self.serving == "always" and self.max_staleness == 0:
            raise ValueError(
                "serving: always needs a max_staleness of 1 or more: what is sampled while a step is computed is one "
                "weight sync old when it is trained"
            )
        if self.n_gpu * self.nnodes % self.tensor_parallel_size:
            raise ValueError("n_gpu * nnodes must be divisible by tensor_parallel_size")
        if self.n_gpu % self.tensor_parallel_size and self.tensor_parallel_size % self.n_gpu:
            raise ValueError("a replica of tensor_parallel_size GPUs lies on one node, or fills whole nodes of n_gpu")
        return self

    @property
    def max_model_len(self) -> int:
        """Tokens that the model takes, prompt and answer together."""
        limit = self.flat_overrides.get("actor_rollout_ref.rollout.max_model_len")
        return limit if isinstance(limit, int) else self.max_prompt_length + self.max_response_length

    @property
    def checkpoint_every(self) -> int:
        """Steps between two checkpoints; 0: the job writes none."""
        steps = self.flat_overrides.get("trainer.save_freq")
        return max(0, steps if isinstance(steps, int) else self.save_freq)

    @property
    def flat_overrides(self) -> dict[str, Any]:
        """What ``overrides`` set, by verl's keys, whether these were written with a ``+`` or as a mapping."""
        settings: dict[str, Any] = {}
        for key, setting in self.overrides.items():
            settings |= flat({key.lstrip("+"): setting})
        return settings

    @property
    def by_agreement(self) -> bool:
        """Whether a batch waits until clients agree to it."""
        return self.collection.endswith("_agree_sync_weight")

    @property
    def model_name(self) -> str:
        """The name clients use for the served model."""
        return self.served_model_name or Path(self.model.rstrip("/")).name

    @property
    def slots(self) -> int:
        """How many episodes may run at once: whole groups only."""
        limit = self.max_parallel_episodes or self.batch_size * self.num_repeat
        return limit // self.num_repeat * self.num_repeat


@dataclass(frozen=True)
class JobFields:
    """The fields of a :class:`TrainJob` that a text sets, and its keys that have no effect here, with why."""

    fields: dict[str, Any]
    ignored: dict[str, str]


def read_fields(text: str) -> JobFields:
    """The job in YAML text, in our form or in one that a pack reads.

    Raises:
        ConfigError: the text is no mapping, or the pack refuses a value; names each.
    """
    read: Callable[[str], JobFields] | None = added("job")
    return JobFields(parse_mapping(text, "job"), {}) if read is None else read(text)


def parse_job(text: str, where: str = "job") -> TrainJob:
    """Read a ``TrainJob`` from YAML (or JSON) text.

    Raises:
        ConfigError: no mapping, a misspelt key, a value out of range; names each.
    """
    return validated(TrainJob, parse_mapping(text, where), where)


def read_job(path: str | os.PathLike[str], **keywords: Any) -> TrainJob:
    """The job in a YAML file; ``keywords`` win over it, of ``overrides`` key by key.

    Raises:
        ConfigError: the file cannot be read, is no mapping, or a key or value is wrong; names each.
    """
    return layered(read_mapping(Path(path), "job"), set_=keywords, where=os.fspath(path)).job


def dump_job(job: TrainJob, *, only_set: bool = False) -> str:
    """The YAML text from which :func:`parse_job` reads an equal job; ``only_set``: of the fields that were given, so
    that a server's defaults may fill the others."""
    return yaml.safe_dump(plain_fields(job, only_set=only_set), sort_keys=False)


def plain_fields(job: TrainJob, *, only_set: bool = False) -> dict[str, Any]:
    """The fields as plain data, an infinity too, for which a model's own JSON has null; ``only_set`` as there."""
    return to_jsonable_python(job.model_dump(exclude_unset=only_set))


class Layered(NamedTuple):
    """A job, and the layer of each of its fields and each of its :attr:`TrainJob.flat_overrides`."""

    job: TrainJob
    fields: dict[str, str]
    overrides: dict[str, str]


def layered(
    job: Mapping[str, Any],
    *,
    set_: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    where: str = "job",
) -> Layered:
    """The job of these layers.

    Args:
        job: fields as in a job's YAML.
        set_: fields, and keys of verl, which have dots or begin with ``+``.
        server: fields as in a job's YAML.
        where: names the job in errors.

    Raises:
        ConfigError: a misspelt field, or a value that is out of range; names each.
    """
    values: dict[str, Any] = {}
    fields: dict[str, str] = {}
    overrides: dict[Any, tuple[Any, Any, str]] = {}
    set_parts = ((SET, part) for part in _of_set(set_ or {}))
    for layer, settings in ((SERVER, server or {}), (JOB, job), *set_parts):
        for name, value in settings.items():
            name = SPELLINGS.get(name, name)
            if name == "overrides" and isinstance(value, Mapping):
                for key, setting in cast("Mapping[Any, Any]", value).items():
                    # with + or without it is the same key; the last one counts where a mapping has it, too
                    bare = key.lstrip("+") if isinstance(key, str) else key
                    overrides.pop(bare, None)
                    overrides[bare] = (key, setting, layer)
            elif fields.get(name) == layer:
                raise ConfigError(f"{where}: {name} is given twice ({layer}), also by AgentJet's name: give one")
            else:
                values[name], fields[name] = value, layer
    if overrides:
        # what is no mapping, or has a key that is no text, is refused
        values.setdefault("overrides", {key: value for key, value, _ in overrides.values()})
    merged = validated(TrainJob, values, where)
    layers = {leaf: layer for key, (_, value, layer) in overrides.items() for leaf in flat({key: value})}
    return Layered(merged, fields, layers)


def _of_set(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``settings`` as fields of a job, and the overrides among them: what has a dot is a key of verl."""
    if "" in settings:
        raise ConfigError("set: a value without a name")
    verl = {name.removeprefix("overrides."): value for name, value in settings.items() if "." in name or name[0] == "+"}
    fields = {name: value for name, value in settings.items() if "." not in name and name[0] != "+"}
    return fields, {"overrides": verl}
