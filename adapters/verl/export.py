"""A checkpoint of verl as a model folder in Hugging Face layout, or as an adapter in PEFT's.

Invariant: no weight is rounded: each is written in the type in which the trainer holds it. A folder under its final
name is whole.

verl has a merger of its own (``python -m verl.model_merger``), which rounds every weight to bf16.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.checkpoints import kept_steps
from swarm.errors import ConfigError
from swarm.files import free_bytes

if TYPE_CHECKING:
    import torch

_SHARD = "model_world_size_{ranks}_rank_{rank}.pt"
#: Files of the folder of configuration and tokenizer that the model itself writes.
_WRITTEN_ANEW = ("config.json", "model.safetensors.index.json")
#: What PEFT puts before the names of a model's weights.
_PEFT = "base_model.model."
#: What verl writes beside the weights of a LoRA run.
_LORA = "lora_train_meta.json"
#: Bytes beside the weights: tokenizer, configuration, card.
_MARGIN = 50_000_000


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: where it is for now.
        dtype: of the weights, by torch's name.
        adapter: whether it is a LoRA adapter alone.
        lora: whether LoRA trained it.
    """

    folder: Path
    dtype: str
    adapter: bool
    lora: bool


@contextlib.contextmanager
def exported(checkpoint: Path, out: Path, base_model: str, *, merged: bool = False) -> Iterator[Exported]:
    """Write the model of ``checkpoint`` aside; at the end of the block it becomes ``out``. What an error leaves is
    removed.

    Args:
        checkpoint: a folder ``global_step_N``; a run may be going on in the folder around it.
        out: the model folder, which must not exist.
        base_model: path or hub name of what was trained; an adapter names it.
        merged: of a LoRA run, write the whole model with the adapter in it and not the adapter alone.

    Raises:
        ConfigError: ``out`` exists, there is no room for it, or the checkpoint is gone or holds no such model.
    """
    actor = checkpoint / "actor"
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    if out.exists():
        raise ConfigError(f"{out} exists: name a folder that does not")
    try:
        shards = _shards(actor)
        # an adapter alone takes little
        if merged or not (actor / _LORA).exists():
            _check_room(out.parent, shards)
        aside.mkdir(parents=True)
        yield _write(actor, shards, aside, base_model, merged=merged)
        aside.rename(out)
    except FileNotFoundError as exc:
        if actor.exists():
            raise
        kept = ", ".join(map(str, kept_steps(checkpoint.parent))) or "none"
        raise ConfigError(
            f"the run removed the checkpoint {checkpoint.name} meanwhile, for a later one; kept are the steps {kept}"
        ) from exc
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _shards(actor: Path) -> list[Path]:
    """The weights of each rank."""
    try:
        ranks = int(json.loads((actor / "fsdp_config.json").read_text())["world_size"])
    except (ValueError, LookupError, TypeError) as exc:
        raise ConfigError(f"{actor} is no checkpoint of verl's FSDP engine: its fsdp_config.json is damaged") from exc
    shards = [actor / _SHARD.format(ranks=ranks, rank=rank) for rank in range(ranks)]
    if missing := [shard.name for shard in shards if actor.exists() and not shard.exists()]:
        raise ConfigError(
            f"{actor} lacks {missing[0]}: it holds the weights of {ranks} ranks, which every node keeps for itself: "
            "copy them into one folder"
        )
    return shards


def _check_room(folder: Path, shards: list[Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = sum(shard.stat().st_size for shard in shards) + _MARGIN, free_bytes(folder)
    if free < needed:
        raise ConfigError(f"{free / 1e9:.1f} GB are free in {folder}, and the model takes up to {needed / 1e9:.1f} GB")


def _write(actor: Path, shards: list[Path], folder: Path, base_model: str, *, merged: bool) -> Exported:
    # what is read is there in full, even if the checkpoint goes: the weights stay mapped
    described = actor / "huggingface"
    beside = (path for path in described.iterdir() if path.is_file() and path.name not in _WRITTEN_ANEW)
    files = {path.name: path.read_bytes() for path in beside if path.suffix != ".safetensors"}
    import torch
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    weights = _joined(shards)
    config = AutoConfig.from_pretrained(described)
    config.name_or_path = base_model
    lora = any(".lora_" in name for name in weights)
    if merged and not lora:
        raise ConfigError("--merged is for LoRA runs: this one trained all weights")
    with torch.device("meta"):
        model = _architecture(config)(config)
        if lora:
            model = _with_adapter(model, weights, actor)
    _fill(model, weights, whole=merged or not lora)
    if lora and not merged:
        model.save_pretrained(folder, save_embedding_layers=False)
        # PEFT's own card, which says nothing
        (folder / "README.md").unlink(missing_ok=True)
    else:
        whole = model.merge_and_unload() if lora else model
        whole.save_pretrained(folder)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for path in folder.glob("*.safetensors"):
        # safetensors lets nobody but the owner read it
        shutil.copymode(next(folder.glob("*config.json")), path)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    return Exported(folder, dtype, adapter=lora and not merged, lora=lora)


def _joined(shards: list[Path]) -> dict[str, torch.Tensor]:
    """The weights of all ranks, each a whole tensor.

    FSDP shards a weight along one axis; what it does not shard, each rank has whole. Where it also replicates, the
    ranks of the first replica come first (see ``verl.model_merger``).
    """
    import torch
    from torch.distributed.tensor import DTensor, Shard

    # it warns that no processes speak to each other
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    ranks: list[dict[str, Any]] = [
        torch.load(shard, map_location="cpu", mmap=True, weights_only=True) for shard in shards
    ]
    joined: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, first in ranks[0].items():
            if not isinstance(first, DTensor):
                joined[name] = first
                continue
            placement, parts = first.placements[-1], first.device_mesh.shape[-1]
            local = [rank[name].to_local() for rank in ranks[:parts]]
            if isinstance(placement, Shard) and parts > 1:
                joined[name] = torch.cat(local, dim=placement.dim)
            else:
                joined[name] = local[0]
    return joined


def _architecture(config: Any) -> Any:
    import transformers

    [name, *_] = config.architectures or [""]
    if (architecture := getattr(transformers, name, None)) is None:
        raise ConfigError(f"transformers has no {name or 'architecture of this name'}: its code came with the model")
    return architecture


def _with_adapter(model: Any, weights: dict[str, torch.Tensor], actor: Path) -> Any:
    """``model`` with an adapter of the shape that ``weights`` have, as verl made it."""
    from peft import LoraConfig, get_peft_model

    try:
        trained = json.loads((actor / _LORA).read_text())
        rank, alpha = int(trained["r"]), int(trained["lora_alpha"])
    except (OSError, ValueError, LookupError, TypeError) as exc:
        raise ConfigError(f"{actor} does not say with which rank and alpha LoRA trained it") from exc
    # by their whole names: the job may train a kind of layer in some places only
    modules = {name.partition(".lora_")[0].removeprefix(_PEFT) for name in weights if ".lora_" in name}
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=sorted(modules), task_type="CAUSAL_LM")
    )


def _fill(model: Any, weights: dict[str, torch.Tensor], *, whole: bool) -> None:
    """Put ``weights`` into ``model``, without a copy; a ``whole`` one lacks none.

    Raises:
        ConfigError: they are not those of this model.
    """
    keys = model.load_state_dict(weights, strict=False, assign=True)
    base, prefix = (model.get_base_model(), _PEFT) if hasattr(model, "peft_config") else (model, "")
    tied = {f"{prefix}{name}" for name in base.all_tied_weights_keys}
    needed = [name for name in keys.missing_keys if name not in tied and (whole or ".lora_" in name)]
    if keys.unexpected_keys or needed:
        wrong = [*keys.unexpected_keys, *needed][0]
        if needed and all(".lora_" in name for name in weights):
            raise ConfigError("--merged needs the whole model, and the checkpoint holds the adapter alone")
        raise ConfigError(f"the checkpoint is not of the model that its config.json describes: {wrong}")
    base.tie_weights()
