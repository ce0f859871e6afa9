"""The HTTP wire of the engine's control: its job, its code, its starts; shaped as in :mod:`swarm.protocol`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from swarm.job import INFINITIES, TrainJob
from swarm.protocol import MAX_NAME, SuccessResponse, WireRequest
from swarm.types import Model


class ResolveConfigRequest(WireRequest):
    """``POST /config/resolve``: a job as YAML text, ours or AgentJet's; ``set`` wins over it, by the names of a job's
    fields and by verl's dotted keys."""

    model_config = INFINITIES

    yaml_as_string: str
    set: dict[str, Any] = {}


class SyncTrainConfigRequest(ResolveConfigRequest):
    """``POST /sync_train_config``: OFFLINE only, unless ``force_restart`` stops the engine and starts it again."""

    force_restart: bool = False
    from_step: int | None = Field(
        default=None,
        ge=1,
        description="go back to this step of the run: what waits for a batch is dropped, and the run goes on as "
        "another one that has done no later step. The checkpoints are the caller's to set back",
    )


class SyncTrainConfigResponse(SuccessResponse):
    """``POST /sync_train_config``."""

    restarted: bool = Field(default=False, description="the engine was stopped for it and started again")
    new_run: bool = Field(
        default=False,
        description="the job differs from the one before: what waited for a batch is dropped, and training starts anew",
    )
    ignored: dict[str, str] = Field(default={}, description="key of a job of AgentJet -> why it has no effect here")


class CodeSnapshot(Model):
    """The code of one sync."""

    id: str = Field(description="when it came (UTC), and the beginning of its digest")
    digest: str = Field(description="SHA-256 of the names, modes and contents of its files")
    created: float = Field(description="Unix seconds")
    sender: str = ""
    revision: str = Field(default="", description="git commit of the sender's checkout; +changes: not all committed")
    message: str = ""
    files: int
    bytes: int


class SyncTrainCodeResponse(SuccessResponse):
    """``POST /sync_train_code`` with a zip as its body, and ``POST /code/select``."""

    temp_ajet_code_path: str = Field(description="the folder on the server that the next engine imports from")
    message: str
    snapshot: CodeSnapshot | None = Field(default=None, description="what is selected now; null: the server's own code")
    changed: bool = Field(default=True, description="false: the selected code has the same content, nothing was done")
    restarted: bool = Field(default=False, description="the engine was stopped for it and started again")
    not_installed: dict[str, list[str]] = Field(
        default={}, description="module that the code imports and this server lacks -> files; code sync sends none"
    )


class SelectCodeRequest(WireRequest):
    """``POST /code/select``: ``id`` of a snapshot, ``none`` for the server's own code, default the one before."""

    id: str | None = Field(default=None, max_length=MAX_NAME)
    force_restart: bool = False


class CodeStatus(Model):
    """``GET /code``: the code that clients have sent."""

    enabled: bool = Field(description="whether this server takes code")
    snapshots: list[CodeSnapshot] = Field(description="oldest first")
    selected: str | None = Field(description="what an engine that starts now imports; null: the server's own code")
    running: str | None = Field(description="what the engine says that it imports; null: none runs, or no synced code")


class ResolvedJob(Model):
    """``POST /config/resolve``: what an engine would run, and where each value comes from.

    A source is ``set``, ``job``, ``server defaults``, ``swarm-gateway`` or ``verl``, for verl's keys with what decides
    it behind a colon.
    """

    model_config = INFINITIES

    job: TrainJob
    job_sources: dict[str, str] = Field(description="by field")
    config: dict[str, Any] = Field(description="verl's, complete")
    sources: dict[str, str] = Field(description="by dotted key, for each value of `config`")


class RunSummary(Model):
    """One start of the engine."""

    number: int = Field(description="counts the starts on this run folder")
    started: float = Field(description="Unix seconds")
    ended: float | None = None
    reason: str = Field(default="", description="why it ended")
    run_id: str = Field(default="", description="of the training run: one that goes on after a crash keeps it")
    code: str | None = Field(default=None, description="the snapshot that was selected")
    model: str = ""


class RunRecord(RunSummary):
    """``GET /config/{number}``."""

    model_config = INFINITIES

    job: TrainJob
    config: dict[str, Any] | None = Field(default=None, description="verl's, once the engine has resolved it")


class RunsResponse(Model):
    """``GET /config``: what ran, oldest first."""

    runs: list[RunSummary]


class StartEngineResponse(SuccessResponse):
    """``POST /start_engine``."""

    pid: int | None = None
