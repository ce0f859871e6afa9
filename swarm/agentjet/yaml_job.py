"""Reads AgentJet's job YAML as a :class:`TrainJob`.

Invariant: every key of the YAML is carried over with its meaning, refused with the reason, or listed as ignored.

AgentJet's client syncs its whole composed configuration: the job under ``ajet``, and beside it the sections of its
trainer (``actor_rollout_ref``, ``trainer``, ...), which its server overwrites from ``ajet``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast, get_args

from pydantic import ValidationError

from swarm.errors import ConfigError
from swarm.job import CollectionMethod, EvalSampling, JobFields, TrainJob, flat
from swarm.validation import in_plain_words, parse_mapping

logger = logging.getLogger(__name__)

#: Begins AgentJet's name of a way to collect batches.
COLLECTION_PREFIX = "rollout_until_"
#: AgentJet's weight of the KL loss, where a job has one and says no other.
KL_LOSS_COEF = 0.002
#: AgentJet's place-holder for the name of the YAML file, in place of the name of an experiment.
UNNAMED = "read_yaml_name"
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_TRAINER = "trainer_common"

#: AgentJet's key below ``ajet`` -> ours with the same meaning and unit.
_FIELDS = {
    "model.path": "model",
    "project_name": "project",
    "experiment_name": "experiment",
    "swarm_mode_sample_collection_max_cached_episodes": "max_cached_episodes",
    "data.train_batch_size": "batch_size",
    "data.max_prompt_length": "max_prompt_length",
    "data.max_response_length": "max_response_length",
    "rollout.num_repeat": "num_repeat",
    "rollout.temperature": "temperature",
    "rollout.max_response_length_in_one_turn": "max_turn_length",
    "rollout.tensor_model_parallel_size": "tensor_parallel_size",
    "rollout.gpu_memory_utilization": "gpu_memory_utilization",
    "rollout.vllm_tool_parser": "tool_call_parser",
    f"{_TRAINER}.n_gpus_per_node": "n_gpu",
    f"{_TRAINER}.nnodes": "nnodes",
    f"{_TRAINER}.algorithm.adv_estimator": "advantage",
    f"{_TRAINER}.mini_batch_num": "mini_batch_num",
    f"{_TRAINER}.optim.lr": "lr",
    f"{_TRAINER}.ppo_epochs": "ppo_epochs",
    f"{_TRAINER}.save_freq": "save_freq",
    f"{_TRAINER}.total_training_steps": "total_training_steps",
}

#: Settings of the optimizer that have the same name in verl.
_OPTIMIZER = (
    "optimizer",
    "optimizer_impl",
    "lr_warmup_steps_ratio",
    "lr_warmup_steps",
    "total_training_steps",
    "weight_decay",
    "betas",
    "min_lr_ratio",
    "num_cycles",
    "lr_scheduler_type",
    "zero_indexed_step",
)
#: AgentJet's key -> verl's key with the same meaning, for settings that a TrainJob has no field for.
_VERL = {
    "rollout.max_num_seqs": f"{_ROLLOUT}.max_num_seqs",
    "rollout.ppo_max_token_len_per_gpu": f"{_ACTOR}.ppo_max_token_len_per_gpu",
    f"{_TRAINER}.fsdp_config.param_offload": f"{_ACTOR}.fsdp_config.param_offload",
    f"{_TRAINER}.fsdp_config.optimizer_offload": f"{_ACTOR}.fsdp_config.optimizer_offload",
    f"{_TRAINER}.kl_loss_type": f"{_ACTOR}.kl_loss_type",
    **{f"{_TRAINER}.optim.{name}": f"{_ACTOR}.optim.{name}" for name in _OPTIMIZER},
    # verl's FSDP engine reads the optimizer's, under this name
    f"{_TRAINER}.optim.grad_clip": f"{_ACTOR}.optim.clip_grad",
    f"{_TRAINER}.ulysses_sequence_parallel_size": f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
}

#: LoRA's keys, read only if ``lora_rank`` turns it on: ours with the same meaning, and verl's.
_LORA = {"lora.lora_rank": "rank", "lora.lora_alpha": "alpha", "lora.target_modules": "targets"}
_LORA_VERL = {
    "lora.load_format": f"{_ROLLOUT}.load_format",
    "lora.layered_summon": f"{_ROLLOUT}.layered_summon",
}

#: Field of a :class:`TrainJob` -> AgentJet's key, where there is one.
KEYS = {
    **{ours: key for key, ours in _FIELDS.items()},
    **{f"lora.{ours}": key for key, ours in _LORA.items()},
    **{f"eval_sampling.{name}": f"rollout.val_kwargs.{name}" for name in EvalSampling.model_fields},
    "max_parallel_episodes": "rollout.max_env_worker",
    "kl_coef": f"{_TRAINER}.kl_loss_coef",
    "logger": f"{_TRAINER}.logger",
}

#: AgentJet's key -> the values it may have, and why no other one is possible.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "backbone": (("verl",), "the only trainer here is verl"),
    "enable_swarm_mode": ((True,), "a swarm server trains on what its clients run, not on a workflow of its own"),
    "rollout.name": (("vllm",), "the only inference engine here is vLLM"),
    "rollout.gamma": ((1,), "every token of an episode gets the same advantage"),
    "rollout.top_p": ((1,), "the trainer's ratio needs log-probabilities of untruncated sampling"),
    "rollout.top_k": ((-1,), "the trainer's ratio needs log-probabilities of untruncated sampling"),
    **dict.fromkeys(
        (f"{_TRAINER}.use_kl_in_reward", f"{_TRAINER}.algorithm.use_kl_in_reward"),
        ((False, None), "rewards are trained as the client gives them; use kl_loss_coef for a penalty"),
    ),
    f"{_TRAINER}.loss_extra_scale_ratio": ((1,), "the loss is not scaled; scale the learning rate"),
    f"{_TRAINER}.loss_weight_normalization_episode_level": (
        (False, None),
        "a token's weight does not depend on how many timelines its episode has",
    ),
    f"{_TRAINER}.val_only": ((False,), "evaluation runs as eval episodes of a client"),
}

#: Pattern of AgentJet's key -> why it has no effect here; for keys that none of the tables above has.
_IGNORED = {
    "experiment_dir": "the operator's run folder is used",
    f"{_TRAINER}.checkpoint_base_dir": "the operator's run folder is used",
    f"{_TRAINER}.save_trajectory_as_json_file": "the journal keeps every trajectory",
    f"{_TRAINER}.total_epochs": "clients bring the tasks: a run is as long as total_training_steps",
    f"{_TRAINER}.test_freq": "evaluation runs as eval episodes of a client",
    f"{_TRAINER}.train_print_to_markdown_file_path": "the journal keeps every trajectory",
    f"{_TRAINER}.val_*": "evaluation runs as eval episodes of a client",
    f"{_TRAINER}.kl_penalty_type": "there is no KL penalty in the reward",
    f"{_TRAINER}.advantage_estimation_episode_level": "advantages are always taken over episodes",
    "rollout.user_workflow": "a client runs its own workflow",
    "rollout.chat_template_generate_prompt_type": "the sampled tokens are trained as they are",
    "rollout.val_kwargs.*": "of it temperature, top_p and top_k hold, where a client does not ask otherwise; "
    "temperature 0 is greedy",
    "rollout.multi_turn.*": "a client runs its own loop",
    "rollout.compute_madness_checklist": "answers are not checked for nonsense: a client or a reward hook does that",
    "rollout.agent_madness_termination": "answers are not checked for nonsense: what follows such an answer is trained",
    "rollout.agent_madness_reward": "rewards are trained as the client gives them; in AgentJet's swarm mode as well",
    "rollout.n_vllm_engine": "as many engines as tensor_model_parallel_size leaves room for",
    "context_tracker.*": "timelines are merged where their token ids agree",
    "lora.*": "lora_rank is 0",
    "teacher_model.*": "teacher_opd_enabled is false",
    "opd.*": "teacher_opd_enabled is false",
    "task_reader.*": "clients bring the tasks",
    "task_judge.*": "clients bring the rewards",
    "interchange_server.*": "AgentJet's own process layout",
    "enable_interchange_server": "AgentJet's own process layout",
    "task_runner.*": "AgentJet's own process layout",
    "debug.*": "AgentJet's own process layout",
    "execute_test*": "AgentJet's own tests",
}


_UNKNOWN = "not known here"


@dataclass(frozen=True, slots=True)
class Conversion:
    """The job, and the keys that have no effect here with the reason."""

    job: TrainJob
    ignored: dict[str, str]


def read_job(text: str) -> JobFields:
    """The job in YAML text, ours or AgentJet's; keys of the latter that have no effect are logged.

    Raises:
        ConfigError: no mapping; of AgentJet's a value that is out of range or not possible here; names each.
    """
    data = parse_mapping(text, "job")
    if "ajet" not in data:
        return JobFields(data, {})
    conversion = convert(data)
    listed = ", ".join(f"{key} ({why})" for key, why in conversion.ignored.items() if why != _UNKNOWN)
    if listed:
        logger.info("the job is AgentJet's; ignored: %s", listed)
    if unknown := [key for key, why in conversion.ignored.items() if why == _UNKNOWN]:
        logger.warning("the job is AgentJet's; without effect, because not known here: %s", ", ".join(unknown))
    return JobFields(conversion.job.model_dump(exclude_unset=True), conversion.ignored)


def convert(config: Mapping[str, Any]) -> Conversion:
    """Convert AgentJet's composed configuration.

    Raises:
        ConfigError: a value is out of range or not possible here; names each by AgentJet's key.
    """
    job: Any = config["ajet"]
    if not isinstance(job, Mapping):
        raise ConfigError(f"job: ajet must be a mapping, got {type(job).__name__}")
    leaves = flat(cast("Mapping[str, Any]", job))
    # a section without keys is null, or an empty mapping
    reader = _Reader({key: value for key, value in leaves.items() if value not in (None, {})})
    values = reader.values()
    if reader.refused:
        raise ConfigError("job: " + "; ".join(reader.refused))
    try:
        trained = TrainJob.model_validate(values)
    except ValidationError as exc:
        raise ConfigError("job: " + "; ".join(_described(exc))) from exc
    ignored = reader.ignored()
    ignored |= {
        str(section): "set verl's keys in `overrides` of a job in our own form"
        for section in config
        if section not in ("ajet", "hydra", "defaults")
    }
    return Conversion(trained, ignored)


class _Reader:
    """Takes the keys of one job, by their dotted names below ``ajet``, and remembers which ones it has taken."""

    def __init__(self, leaves: Mapping[str, Any]) -> None:
        self._values = leaves
        self._taken: set[str] = set()
        self.refused: list[str] = []

    def values(self) -> dict[str, Any]:
        """Fields of a TrainJob; adds to :attr:`refused`."""
        values: dict[str, Any] = {
            ours: self._take(theirs) for theirs, ours in _FIELDS.items() if theirs in self._values
        }
        if values.get("experiment") == UNNAMED:
            del values["experiment"]
        for key, (allowed, why) in _ONLY.items():
            if key in self._values and (value := self._take(key)) not in allowed:
                self.refused.append(f"ajet.{key} cannot be {value!r}: {why}")
        self._refuse_teacher()
        values |= self._collection() | self._slots(values) | self._kl() | self._tools() | self._loggers()
        values |= {"dialect": "agentjet"} | self._eval_sampling() | self._lora()
        values["overrides"] = self._overrides(values)
        return values

    def ignored(self) -> dict[str, str]:
        """Keys that were not taken, or the pattern for several of them, with the reason."""
        ignored: dict[str, str] = {}
        # where LoRA is on, what it has no place for is not known
        reasons = {pattern: why for pattern, why in _IGNORED.items() if pattern != "lora.*" or not self._trains_lora}
        for key in sorted(set(self._values) - self._taken):
            pattern = next((pattern for pattern in reasons if fnmatchcase(key, pattern)), key)
            ignored[f"ajet.{pattern}"] = reasons.get(pattern, _UNKNOWN)
        return ignored

    def _take(self, key: str, default: Any = None) -> Any:
        self._taken.add(key)
        return self._values.get(key, default)

    def _collection(self) -> dict[str, Any]:
        key = "swarm_mode_sample_collection_method"
        if key not in self._values:
            return {}
        method = str(self._take(key))
        ours = method.removeprefix(COLLECTION_PREFIX)
        methods = get_args(CollectionMethod)
        if ours not in methods or not method.startswith(COLLECTION_PREFIX):
            names = ", ".join(COLLECTION_PREFIX + name for name in methods)
            self.refused.append(f"ajet.{key} cannot be {method!r}: known are {names}")
        return {"collection": ours}

    def _slots(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """AgentJet runs ``min(batch_size, max_env_worker // num_repeat)`` groups at once, and so does a TrainJob whose
        limit is at most a whole batch."""
        workers = self._take("rollout.max_env_worker")
        batch, repeat = (_positive(values.get(name, TrainJob.model_fields[name].default)) for name in _SIZES)
        if not isinstance(workers, int) or batch is None or repeat is None:
            return {} if workers is None else {"max_parallel_episodes": workers}
        return {"max_parallel_episodes": min(workers, batch * repeat)}

    def _kl(self) -> dict[str, Any]:
        use, coefficient = self._take(f"{_TRAINER}.use_kl_loss"), self._take(f"{_TRAINER}.kl_loss_coef")
        if use not in (True, False, None):
            self.refused.append(f"ajet.{_TRAINER}.use_kl_loss cannot be {use!r}: true or false")
        if use is False:
            return {"kl_coef": 0.0}
        if coefficient is None:
            return {"kl_coef": KL_LOSS_COEF} if use else {}
        return {"kl_coef": coefficient}

    def _eval_sampling(self) -> dict[str, Any]:
        keys = {name: f"rollout.val_kwargs.{name}" for name in EvalSampling.model_fields}
        sampling = {name: self._take(key) for name, key in keys.items() if key in self._values}
        return {"eval_sampling": sampling} if sampling else {}

    @property
    def _trains_lora(self) -> bool:
        return self._take("lora.lora_rank", 0) != 0

    def _lora(self) -> dict[str, Any]:
        if not self._trains_lora:
            return {}
        return {"lora": {ours: self._take(key) for key, ours in _LORA.items() if key in self._values}}

    def _tools(self) -> dict[str, Any]:
        key = "rollout.force_disable_toolcalls"
        disabled = self._take(key)
        if disabled not in (True, False, None):
            self.refused.append(f"ajet.{key} cannot be {disabled!r}: true or false")
        return {"tool_call_parser": "none"} if disabled is True else {}

    def _refuse_teacher(self) -> None:
        """Refuse distillation; if its switch is off, its other keys are only defaults."""
        switch = "teacher_model.teacher_opd_enabled"
        if self._values.get(switch) is False:
            return
        if keys := sorted(f"ajet.{key}" for key in self._values if key.startswith(("teacher_model.", "opd."))):
            # without the values: one of them is a key to somebody's server
            self.refused.append(
                f"{', '.join(keys)}: nothing is distilled from a teacher here; set ajet.{switch} to false"
            )

    def _loggers(self) -> dict[str, Any]:
        loggers = self._take(f"{_TRAINER}.logger")
        if loggers is None:
            return {}
        # a single name gets the console beside it
        return {"logger": list(dict.fromkeys(["console", loggers])) if isinstance(loggers, str) else loggers}

    def _overrides(self, values: Mapping[str, Any]) -> dict[str, Any]:
        carried = dict(_VERL)
        if "lora" in values:
            carried |= _LORA_VERL
        overrides = {theirs: self._take(ours) for ours, theirs in carried.items() if ours in self._values}
        total = self._take("rollout.max_model_len")
        lengths = [_positive(values.get(name, TrainJob.model_fields[name].default)) for name in _LENGTHS]
        if total is not None and _positive(total) is None:
            self.refused.append(f"ajet.rollout.max_model_len cannot be {total!r}: a number of tokens")
        elif total is not None and None not in lengths:
            needed = sum(length or 0 for length in lengths)
            if total < needed:
                self.refused.append(
                    f"ajet.rollout.max_model_len cannot be {total}: max_prompt_length and max_response_length "
                    f"together are {needed}"
                )
            elif total > needed:
                overrides[f"{_ROLLOUT}.max_model_len"] = total
        return overrides


_SIZES = ("batch_size", "num_repeat")
_LENGTHS = ("max_prompt_length", "max_response_length")


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _described(exc: ValidationError) -> Iterator[str]:
    for error in exc.errors():
        field = [str(part) for part in error["loc"]]
        words = in_plain_words(error)
        if key := KEYS.get(".".join(field[:2])) or KEYS.get("".join(field[:1])):
            yield f"ajet.{key}: {words}"
        else:
            yield re.sub(r"\w+_\w+", lambda word: f"ajet.{KEYS[word[0]]}" if word[0] in KEYS else word[0], words)
