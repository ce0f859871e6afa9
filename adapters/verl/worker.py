"""The trainer's worker process: verl's own, with corrections that verl leaves to subclasses.

Invariants: two runs on one machine never share the socket that carries weights from the trainer to vLLM; any number of
rows is trained, and padding rows change no gradient.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name
from verl.utils.model import convert_weight_keys
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from adapters.verl.lora import targets_by_their_name
from adapters.verl.meeting import meet_in_a_file, private_handle
from adapters.verl.steps import micro_batch_rows
from swarm.packs import added

#: by how much the trainer lowers its priority on a CPU. At 5, a token takes vLLM as long beside the trainer as without
#: it (180-200 ms of SmolLM2-135M on two cores), and the trainer takes the cores whenever vLLM leaves one.
NICENESS = 5


#: None where the pack is not installed: verl's own engine then computes each row
SharedPrefixEngine: Any = added("shared_prefixes")
if SharedPrefixEngine is not None:
    # beside verl's own, which is of no vendor
    EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cuda", vendor="nvidia")(SharedPrefixEngine)


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cpu")
class CpuEngine(SharedPrefixEngine or FSDPEngineWithLMHead):
    """verl's FSDP engine on the CPU."""

    def _build_fsdp_module(self, module: Any) -> Any:
        # verl keeps a forward-only model (the reference of the KL loss) in pinned host memory, which torch has only
        # beside an accelerator; here it is in host memory anyway
        config = self.engine_config
        self.engine_config = dataclasses.replace(config, forward_only=False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = config

    def get_per_tensor_param(self, layered_summon: bool = False, base_sync_done: bool = False, **more: Any) -> Any:
        """What vLLM gets: names with weights, and the configuration of an adapter or ``None``."""
        module = self.module
        if not (base_sync_done and isinstance(module, PeftModel)) or self.model_config.lora.get("merge", False):
            return super().get_per_tensor_param(layered_summon, base_sync_done, **more)
        # for an adapter verl moves each weight of the model to where it is, and gathers them all
        weights = dict(module.named_parameters())
        sent = ((name, _whole(weights[own]).detach()) for name, own in self._adapter_names.items())
        return sent, module.peft_config["default"].to_dict()

    @cached_property
    def _adapter_names(self) -> dict[str, str]:
        """The names under which the weights of the adapter are sent, with their names in the model."""
        trained = {name: name for name, weight in self.module.named_parameters() if weight.requires_grad}
        return convert_weight_keys(get_peft_model_state_dict(self.module, trained), self.module)

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        # verl rounds them to bf16, in which small changes of a weight are none; here vLLM computes in fp32
        with merged_lora_context(self.module, backup_adapters=True):
            weights = convert_weight_keys(normalize_peft_param_name(self.module.state_dict()), self.module)
            for name, weight in weights.items():
                # a copy: they are put back before the last one is sent
                yield name, _whole(weight).detach().clone()


def _whole(weight: torch.Tensor) -> torch.Tensor:
    """All of ``weight``; it may be the weight itself."""
    if not isinstance(weight, DTensor):
        return weight
    # to gather is slow for one rank, too
    return weight.to_local() if weight.device_mesh.size() == 1 else weight.full_tensor()


@contextmanager
def _read_into_memory() -> Iterator[None]:
    """Have torch read files into the machine's memory: by itself it reads weights onto the GPU that wrote them, where
    they are beside those of the model, and perhaps beside a vLLM that is awake."""
    load = torch.load
    torch.load = partial(load, map_location="cpu")
    try:
        yield
    finally:
        torch.load = load


def _shares_prefixes(engine: Any) -> bool:
    return SharedPrefixEngine is not None and isinstance(engine, SharedPrefixEngine)


class SwarmTrainingWorker(TrainingWorker):
    """Training engine that takes rows of any number and length, where verl's stops if they do not fit its sizes."""

    def train_batch(self, data: Any) -> Any:
        """One optimizer step; a mean over rows (``seq-mean-…``) is over those that are no padding."""
        real = sum(bool(mask.any()) for mask in data["loss_mask"].unbind())
        tu.assign_non_tensor(data, global_batch_size=self._reduced(real, torch.distributed.ReduceOp.SUM))
        self._fit(data, self.engine_config.micro_batch_size_per_gpu, self.engine_config.max_token_len_per_gpu)
        return super().train_batch(data)

    def infer_batch(self, data: Any) -> Any:
        """Log-probabilities of the rows."""
        config = self.engine_config
        self._fit(data, config.infer_micro_batch_size_per_gpu, config.infer_max_token_len_per_gpu)
        return super().infer_batch(data)

    def train_mini_batch(self, data: Any) -> Any:
        """All optimizer steps of a batch; the metrics also say what shared prefixes saved since the last batch."""
        output = super().train_mini_batch(data)
        if _shares_prefixes(self.engine):
            saved = self.engine.take_savings()
            if output is not None:
                tu.assign_non_tensor(output, metrics=tu.get(output, "metrics") | saved)
        return output

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Weights, moments and place in the schedule; rates are the job's, which may have changed, and not those of the
        checkpoint, which torch loads too."""
        optimizer, schedule = self.engine.optimizer, self.engine.lr_scheduler
        own, rates = [dict(group) for group in optimizer.param_groups], schedule.base_lrs
        with _read_into_memory():
            super().load_checkpoint(*args, **kwargs)
        schedule.base_lrs = rates
        for group, settings, rate, share in zip(optimizer.param_groups, own, rates, schedule.lr_lambdas, strict=True):
            group |= settings | {"lr": rate * share(schedule.last_epoch)}

    def _fit(self, data: Any, rows: int, tokens: int) -> None:
        """Have ``data`` computed in micro-batches of at most so many rows, or tokens; a row alone may be longer."""
        if self.engine_config.use_dynamic_bsz:
            longest = self._reduced(int(data["input_ids"].offsets().diff().max()), torch.distributed.ReduceOp.MAX)
            tu.assign_non_tensor(data, max_token_len_per_gpu=max(tokens, longest))
        else:
            tu.assign_non_tensor(data, micro_batch_size_per_gpu=micro_batch_rows(len(data), rows))

    def _reduced(self, value: int, how: Any) -> int:
        """``value`` of all data-parallel ranks together."""
        total = torch.tensor(value, device=get_device_id())
        torch.distributed.all_reduce(total, op=how, group=self.engine.get_data_parallel_group())
        return int(total)


class SwarmWorker(ActorRolloutRefWorker):
    """Actor, rollout adapter and reference model of one device."""

    actor_worker_cls = SwarmTrainingWorker
    ref_worker_cls = SwarmTrainingWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        meet_in_a_file()
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the models, then move the weight socket to a path of this run."""
        with targets_by_their_name():
            super().init_model()
        if self.rollout is not None:
            self.rollout.zmq_handle = private_handle(self.rollout.zmq_handle)
        engines = [worker.engine for worker in (self.actor, self.ref) if worker is not None]
        for engine in engines:
            if _shares_prefixes(engine):
                engine.shared_prefixes = self.config.shared_prefixes
                engine.savings = engines[0].savings


class CpuTrainingWorker(SwarmTrainingWorker):
    """Training engine on the CPU."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        # verl would ask torch for "cpu:gloo,cpu:gloo", which it refuses as a duplicate; verl leaves a group that
        # exists alone
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                backend="gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                init_method=os.environ.get("DIST_INIT_METHOD"),
            )
        super().__init__(config)


class SwarmCpuWorker(SwarmWorker):
    """:class:`SwarmWorker` whose engines run on the CPU, at a lower priority than vLLM and the servers."""

    actor_worker_cls = CpuTrainingWorker
    ref_worker_cls = CpuTrainingWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # before the first computation: the threads that it starts have the priority of this one
        os.nice(NICENESS)
        super().__init__(*args, **kwargs)
