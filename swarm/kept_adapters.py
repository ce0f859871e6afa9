"""The adapters (LoRA) of kept versions, with which a job's own engine samples beside the newest: where they lie in the
run folder, and by which name vLLM is asked for them.

Invariant: only the swarm server gives vLLM a model's name, so that nobody else chooses the version of a request.
"""

from __future__ import annotations

from pathlib import Path

from swarm.job import TrainJob

#: In the run folder; what answers users in the place of their first incumbent.
INCUMBENTS = "incumbents"
#: The version that has no adapter: the model below it.
BASE = 0
#: Versions with an adapter that an engine has in memory: of each route that follows promotions the incumbent, and the
#: one before it until its last answers have ended.
MOST_KEPT = 6
_MARK = "#kept-"


def serves_kept(job: TrainJob) -> bool:
    """Whether the engine of ``job`` surely answers with kept versions, at any time."""
    return job.lora is not None and job.serving == "always" and not merges_adapter(job)


def merges_adapter(job: TrainJob) -> bool:
    """Whether a job with ``lora`` sends whole weights all the same."""
    return bool(job.flat_overrides.get("actor_rollout_ref.model.lora.merge"))


def adapter_folder(run_dir: Path, version: int) -> Path:
    """Where the adapter of ``version`` is, as PEFT writes it."""
    return run_dir / INCUMBENTS / f"adapter-{version}"


def has_adapter(run_dir: Path, version: int) -> bool:
    """Whether an engine can sample with ``version`` beside the newest."""
    return version == BASE or (adapter_folder(run_dir, version) / "adapter_config.json").is_file()


def kept_model(model: str, version: int) -> str:
    """What vLLM, which serves ``model``, is asked for so that it samples with ``version``."""
    return f"{model}{_MARK}{version}"


def kept_version(asked: str | None) -> int | None:
    """The version that a request for the model ``asked`` is sampled with; ``None``: the newest."""
    _, mark, version = (asked or "").rpartition(_MARK)
    return int(version) if mark and version.isdecimal() else None
