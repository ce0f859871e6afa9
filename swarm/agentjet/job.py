"""``AgentJetJob``: a training run by AgentJet's keywords, YAML files and configuration tree.

Invariant: a keyword wins over the job's YAML, which wins over AgentJet's defaults (:data:`DEFAULTS`), and these win
over the server's and verl's. What no trainer here can do is refused by name; what merely has no effect is warned about.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from swarm.agentjet.yaml_job import COLLECTION_PREFIX, KEYS, KL_LOSS_COEF, UNNAMED, convert
from swarm.errors import ConfigError
from swarm.job import TrainJob, flat, layered
from swarm.validation import read_mapping

logger = logging.getLogger(__name__)

_COMMON, _ROLLOUT = "trainer_common", "rollout"
_TIMELINES = "context_tracker.timeline_merging_policy"
#: Keyword -> AgentJet's key below ``ajet``.
KEYWORDS = {
    "experiment_dir": "experiment_dir",
    "project_name": "project_name",
    "experiment_name": "experiment_name",
    "logging": f"{_COMMON}.logger",
    "n_gpu": f"{_COMMON}.n_gpus_per_node",
    "nnodes": f"{_COMMON}.nnodes",
    "model": "model.path",
    "algorithm": f"{_COMMON}.algorithm.adv_estimator",
    "num_repeat": f"{_ROLLOUT}.num_repeat",
    "grpo_n": f"{_ROLLOUT}.num_repeat",
    "batch_size": "data.train_batch_size",
    "swarm_mode": "enable_swarm_mode",
    "swarm_mode_sample_collection_method": "swarm_mode_sample_collection_method",
    "max_env_worker": f"{_ROLLOUT}.max_env_worker",
    "backbone": "backbone",
    "max_prompt_length": "data.max_prompt_length",
    "max_response_length": "data.max_response_length",
    "max_response_length_in_one_turn": f"{_ROLLOUT}.max_response_length_in_one_turn",
    "max_model_len": f"{_ROLLOUT}.max_model_len",
    "mini_batch_num": f"{_COMMON}.mini_batch_num",
    "lora_rank": "lora.lora_rank",
    "lora_alpha": "lora.lora_alpha",
    "lora_target_modules": "lora.target_modules",
    "lora_load_format": "lora.load_format",
    "layered_summon": "lora.layered_summon",
    "gpu_memory_utilization": f"{_ROLLOUT}.gpu_memory_utilization",
    "tensor_model_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "ulysses_sequence_parallel_size": f"{_COMMON}.ulysses_sequence_parallel_size",
    "ppo_max_token_len_per_gpu": f"{_ROLLOUT}.ppo_max_token_len_per_gpu",
    "max_num_seqs": f"{_ROLLOUT}.max_num_seqs",
    "lr": f"{_COMMON}.optim.lr",
    "ppo_epochs": f"{_COMMON}.ppo_epochs",
    "total_training_steps": f"{_COMMON}.total_training_steps",
    "use_kl_loss": f"{_COMMON}.use_kl_loss",
    "use_kl_in_reward": f"{_COMMON}.algorithm.use_kl_in_reward",
    "kl_penalty_type": f"{_COMMON}.kl_penalty_type",
    "loss_weight_normalization_episode_level": f"{_COMMON}.loss_weight_normalization_episode_level",
    "advantage_estimation_episode_level": f"{_COMMON}.advantage_estimation_episode_level",
    "compute_madness_checklist": f"{_ROLLOUT}.compute_madness_checklist",
    "timeline_compare_level": f"{_TIMELINES}.timeline_compare_level",
    "val_print_to_markdown_file_path": f"{_COMMON}.val_print_to_markdown_file_path",
    "train_print_to_markdown_file_path": f"{_COMMON}.train_print_to_markdown_file_path",
}
#: Values that are sent where nobody gives another one.
DEFAULTS: dict[str, Any] = {
    "project_name": "ajet_default_project",
    "backbone": "verl",
    "swarm_mode": True,
    "swarm_mode_sample_collection_method": "rollout_until_finish_enough_tasks",
    "n_gpu": 8,
    "nnodes": 1,
    "algorithm": "grpo",
    "num_repeat": 4,
    "batch_size": 32,
    "max_env_worker": 128,
    "max_prompt_length": 3000,
    "max_response_length": 15000,
    "mini_batch_num": 1,
    "gpu_memory_utilization": 0.85,
    "tensor_model_parallel_size": 1,
    "lr": 1e-6,
    "ppo_epochs": 1,
}
#: The same for keys without a keyword: what decides what is learned, and that weights are kept. How it is run (memory,
#: tool parser, loggers) is the server's and verl's.
_DEFAULT_KEYS: dict[str, Any] = {
    f"{_ROLLOUT}.temperature": 0.9,
    f"{_COMMON}.use_kl_loss": True,
    f"{_COMMON}.kl_loss_coef": KL_LOSS_COEF,
    f"{_COMMON}.kl_loss_type": "low_var_kl",
    f"{_COMMON}.optim.weight_decay": 0.01,
    f"{_COMMON}.optim.betas": [0.9, 0.999],
    f"{_COMMON}.optim.grad_clip": 20.0,
    f"{_COMMON}.save_freq": 20,
}
#: AgentJet's bound of one answer, where the job sets none.
_BOUND = "max_response_length_in_one_turn"
_ONE_TURN = 4096
#: What attributes show that were never given, and that decide nothing then.
_SHOWN = {"lora_rank": 0, "lora_alpha": 16, "lora_target_modules": "all-linear", "lora_load_format": "auto"}
_REFUSED = {"n_gpu_for_infer": "the only trainer here is verl, which samples on the GPUs that it trains on"}
#: Sections in which scripts set keys: ``job.config.ajet.trainer_common.save_freq = 5``.
_SECTIONS = (
    "model",
    "data",
    "rollout.val_kwargs",
    "rollout.multi_turn",
    "trainer_common.algorithm",
    "trainer_common.optim",
    "trainer_common.fsdp_config",
    "lora",
    "teacher_model",
    "opd",
    "task_reader",
    _TIMELINES,
)


class Section:
    """A mapping whose keys are attributes."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the job's configuration has no {name!r} here, as nobody set it")

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            keys, value = cast("Mapping[str, Any]", value), Section()
            for key, inner in keys.items():
                setattr(value, str(key), inner)
        vars(self)[name] = value

    def to_dict(self) -> dict[str, Any]:
        """The keys that are set, without empty sections."""
        plain = {key: value.to_dict() if isinstance(value, Section) else value for key, value in vars(self).items()}
        return {key: value for key, value in plain.items() if value != {}}

    def section(self, name: str) -> Section:
        """The section below this one, made where there is none."""
        if not isinstance(vars(self).get(name), Section):
            setattr(self, name, Section())
        return cast("Section", vars(self)[name])


class AgentJetJob:
    """One training run, in AgentJet's words; see :data:`KEYWORDS`.

    Args:
        base_yaml_config: a YAML file of AgentJet's or ours; the other keywords win over it.
        ensure_new_experiment: put the time behind the experiment's name.
        keywords: ``None`` leaves a value as it is.

    Attributes:
        config: the tree of AgentJet's keys, which scripts may change until the job is synced.
        extras: fields of a :class:`TrainJob` from a file of ours that AgentJet has no key for.

    Raises:
        ConfigError: an unknown keyword, a file that cannot be read, or what cannot be done here; names each.
    """

    config: Any
    extras: dict[str, Any]
    _warned: set[str]

    def __init__(
        self, base_yaml_config: str | None = None, ensure_new_experiment: bool = False, **keywords: Any
    ) -> None:
        vars(self).update(config=Section(), extras={}, base_yaml_config=base_yaml_config, _warned=set[str]())
        for path in _SECTIONS:
            self._parent(f"{path}.")
        for key, value in _DEFAULT_KEYS.items():
            self._put(key, value)
        self._set(DEFAULTS)
        if base_yaml_config is not None:
            self._read(Path(base_yaml_config))
            if self._get("experiment_name") in (None, UNNAMED):
                self.experiment_name = Path(base_yaml_config).stem
        self._set(keywords)
        if ensure_new_experiment:
            self.experiment_name = "_".join(filter(None, (self.experiment_name, time.strftime("%Y%m%d-%H%M%S"))))
        self._check()

    def __getattr__(self, name: str) -> Any:
        if name not in KEYWORDS:
            raise AttributeError(f"AgentJetJob has no attribute {name!r}")
        if name == "max_model_len" and self._get(name) is None:
            return self.max_prompt_length + self.max_response_length
        if name == _BOUND and self._get(name) is None:
            return min(_ONE_TURN, self.max_response_length)
        value = self._get(name)
        return _SHOWN.get(name) if value is None else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in KEYWORDS:
            raise AttributeError(f"AgentJetJob has no attribute {name!r} to set; keys are set in config.ajet")
        self._put(KEYWORDS[name], value)

    # ------------------------------------------------------------------ files

    def build_job_from_yaml(self, yaml_path: str | os.PathLike[str], **keywords: Any) -> dict[str, Any]:
        """Read a YAML file, AgentJet's (``ajet:``) or ours, whole or a few keys, over what the job has; ``keywords``
        win over it.

        Returns:
            The job's configuration.

        Raises:
            ConfigError: like the constructor.
        """
        self._read(Path(yaml_path))
        self._set(keywords)
        self._check()
        return self.config_as_dict

    def dump_job_as_yaml(self, yaml_path: str | os.PathLike[str]) -> str:
        """Write the job to a YAML file, from which :meth:`build_job_from_yaml` reads an equal one; its path.

        Raises:
            ConfigError: the file cannot be written.
        """
        path = Path(yaml_path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump({**self.config_as_dict, **self.extras}, sort_keys=False), encoding="utf-8")
        except OSError as exc:
            raise ConfigError(f"cannot write the job {path}: {exc.strerror}") from exc
        return os.fspath(yaml_path)

    @property
    def config_as_dict(self) -> dict[str, Any]:
        """The configuration as it is sent, with AgentJet's bound of one answer."""
        tree: dict[str, Any] = self.config.to_dict()
        tree["ajet"]["rollout"].setdefault(_BOUND, self.max_response_length_in_one_turn)
        return tree

    def to_yaml(self) -> str:
        """The text that is synced, without :attr:`extras`."""
        return yaml.safe_dump(self.config_as_dict, sort_keys=False)

    def train_job(self) -> TrainJob:
        """The job in our words; warns about keys that have no effect.

        Raises:
            ConfigError: a value is missing, out of range or not possible here; names each.
        """
        tree = self.config_as_dict
        for key, why in convert(tree).ignored.items():
            if key not in self._warned:
                self._warned.add(key)
                logger.warning("the job's %s has no effect: %s", key, why)
        return self._job(tree)

    # ------------------------------------------------------------------ not here

    def set_workflow(self, *_: Any, **__: Any) -> AgentJetJob:
        """Not here.

        Raises:
            ConfigError: always; says what to use.
        """
        raise ConfigError("AgentJetJob runs no workflow here: `swarm-gateway train` does, see docs/train.md")

    set_data = tune = set_workflow

    # ------------------------------------------------------------------ keys

    def _parent(self, path: str) -> Section:
        """The section that holds the key at ``path`` below ``ajet``."""
        section: Section = self.config.section("ajet")
        for name in path.split(".")[:-1]:
            section = section.section(name)
        return section

    def _put(self, path: str, value: Any) -> None:
        setattr(self._parent(path), path.rpartition(".")[2], value)

    def _get(self, keyword: str) -> Any:
        path = KEYWORDS[keyword]
        return vars(self._parent(path)).get(path.rpartition(".")[2])

    def _set(self, keywords: Mapping[str, Any]) -> None:
        settings = {name: value for name, value in keywords.items() if value is not None}
        for name in settings:
            if name in _REFUSED:
                raise ConfigError(f"AgentJetJob cannot have {name}: {_REFUSED[name]}")
            if name not in KEYWORDS:
                meant = difflib.get_close_matches(name, KEYWORDS, n=1)
                hint = f"; did you mean {meant[0]!r}?" if meant else "; AgentJet's other keys are set in config.ajet"
                raise ConfigError(f"AgentJetJob has no keyword {name!r}{hint}")
        if len({repr(settings[name]) for name in ("num_repeat", "grpo_n") if name in settings}) > 1:
            raise ConfigError("AgentJetJob: grpo_n and num_repeat are the same field: give one of them")
        for name, value in settings.items():
            setattr(self, name, value)

    def _read(self, path: Path) -> None:
        for name, value in read_mapping(path, "job").items():
            if name == "ajet":
                if not isinstance(value, Mapping):
                    raise ConfigError(f"the job {path}: ajet must be a mapping, got {type(value).__name__}")
                for key, leaf in flat(cast("Mapping[str, Any]", value)).items():
                    if leaf == {}:
                        continue
                    section, last = self._parent(key), key.rpartition(".")[2]
                    if not isinstance(vars(section).get(last), Section):
                        setattr(section, last, leaf)
                    elif leaf is not None:  # a section without keys is null
                        raise ConfigError(f"the job {path}: ajet.{key} must be a mapping, got {type(leaf).__name__}")
            elif name == "collection":
                self.swarm_mode_sample_collection_method = f"{COLLECTION_PREFIX}{value}"
            elif name == "kl_coef":
                common = self._parent(f"{_COMMON}.")
                common.use_kl_loss, common.kl_loss_coef = value != 0, value
            elif (key := KEYS.get(name) or KEYWORDS.get(name)) is not None:
                self._put(key, value)
            elif name == "lora" and isinstance(value, Mapping) and all(f"lora.{field}" in KEYS for field in value):
                for field, setting in cast("Mapping[str, Any]", value).items():
                    self._put(KEYS[f"lora.{field}"], setting)
            elif name == "overrides" and isinstance(value, Mapping):
                self.extras["overrides"] = {**self.extras.get("overrides", {}), **cast("Mapping[str, Any]", value)}
            elif name in TrainJob.model_fields:
                self.extras[name] = value
            elif name not in ("hydra", "defaults"):
                logger.warning("the job %s: %s has no effect: set verl's keys in `overrides`", path, name)

    def _check(self) -> None:
        """Refuse what can be seen before the model is known."""
        self._job({"ajet": {"model": {"path": "not set yet"}, **self.config_as_dict["ajet"]}})

    def _job(self, tree: Mapping[str, Any]) -> TrainJob:
        return layered(convert(tree).job.model_dump(exclude_unset=True), set_=self.extras).job


# scripts look the keywords up there
AgentJetJob.__init__.__dict__["__signature__"] = inspect.Signature(
    [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        inspect.Parameter("base_yaml_config", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
        inspect.Parameter("ensure_new_experiment", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in KEYWORDS),
    ]
)
