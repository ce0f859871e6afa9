"""The HTTP wire of the swarm server: one model per body and answer, compatible with AgentJet's clients.

Requests ignore unknown fields (other clients send more than we read); our answers are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from swarm.job import TrainJob
from swarm.states import EngineState
from swarm.types import Model, StepResult, WorkflowOutput

#: Phrases by which AgentJet's client tells why a claim failed; it searches for them in ``fail_cause``.
SYNCING = "Engine is syncing weights"
POST_ROLLING = "Engine is in post-rolling phase"
NO_EPISODES = "No available episodes to claim."

EpisodeType = Literal["train", "eval"]


class WireRequest(BaseModel):
    """Base of request bodies: frozen, tolerant of fields that a foreign client adds."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SyncTrainConfigRequest(WireRequest):
    """``POST /sync_train_config``: the job as YAML text; OFFLINE only."""

    yaml_as_string: str


class SuccessResponse(Model):
    """Outcome of a command; ``error`` says why and what to do when it failed."""

    success: bool
    error: str | None = None


class RefusedResponse(SuccessResponse):
    """``/sync_train_config`` while the engine is not OFFLINE, with status 400 as AgentJet's client expects it; ``code``
    is for ours."""

    code: str


class StartEngineResponse(SuccessResponse):
    """``POST /start_engine``."""

    pid: int | None = None


class EngineStatus(Model):
    """``GET /get_engine_status``."""

    engine_status: EngineState
    engine_status_detail: str = ""
    global_step: int = 0


class ClaimEpisodeRequest(WireRequest):
    """``POST /claim_episode``. ``wait_seconds`` > 0 long-polls until an episode is free or the time is over."""

    client_uuid: str = Field(min_length=1)
    episode_type: EpisodeType = "train"
    discard_episode_timeout: float = Field(default=240.0, gt=0)
    throttle_policy: dict[str, Any] | None = None
    wait_seconds: float = Field(default=0.0, ge=0, le=60)


class ClaimEpisodeResponse(Model):
    """One claimed episode, or ``success=false`` with the reason in ``fail_cause``."""

    success: bool
    client_uuid: str
    episode_uuid: str = ""
    openai_base_url: str = ""
    openai_api_key: str = ""
    fail_cause: str = ""


class ClaimGroupRequest(ClaimEpisodeRequest):
    """``POST /claim_group``: claims ``count`` episodes at once or none, so that two half-claimed groups never wait
    for each other."""

    count: int = Field(ge=1, le=1024)


class ClaimedEpisode(Model):
    """Address and key of one claimed episode; the key works for this episode only and dies with it."""

    episode_uuid: str
    openai_base_url: str
    openai_api_key: str


class ClaimGroupResponse(Model):
    """The claimed episodes, or ``success=false`` with the reason in ``fail_cause``."""

    success: bool
    client_uuid: str
    episodes: list[ClaimedEpisode] = []
    fail_cause: str = ""


def _tolerant(value: Any) -> Any:
    """A foreign client's workflow output as ours: unknown and null fields, and metrics that are no number, are left
    out; what is wrong with the reward stays wrong."""
    if not isinstance(value, Mapping):
        return value
    given = cast("Mapping[str, Any]", value)
    known = {key: one for key, one in given.items() if key in WorkflowOutput.model_fields and one is not None}
    metrics: Any = known.get("log_metrics")
    if isinstance(metrics, Mapping):
        named = cast("Mapping[str, Any]", metrics)
        known["log_metrics"] = {key: one for key, one in named.items() if _is_number(one)}
    return known


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


WireOutput = Annotated[WorkflowOutput, BeforeValidator(_tolerant)]


class EpisodeRequest(WireRequest):
    """``POST /can_continue_episode``, ``/abort_episode`` and whatever names one episode of one client."""

    client_uuid: str = Field(min_length=1)
    episode_uuid: str = Field(min_length=1)


class EndEpisodeRequest(EpisodeRequest):
    """``POST /end_episode``. Repeating it with the same episode is answered like the first time."""

    task_id: str = Field(min_length=1)
    workflow_output: WireOutput
    declare_client_active: bool = True


class EpisodeEnd(WireRequest):
    """One member of an ended group."""

    episode_uuid: str
    workflow_output: WireOutput


class EndGroupRequest(WireRequest):
    """``POST /end_group``: ends all episodes of one task in one transition."""

    client_uuid: str = Field(min_length=1)
    task_id: str = Field(min_length=1)
    ends: list[EpisodeEnd] = Field(min_length=1)


class CanContinueResponse(Model):
    """Whether the episode is still this client's to run."""

    can_continue: bool


class PoolInformation(Model):
    """``GET /get_current_batch_rollout_pool_information``: what the current batch has and still needs."""

    batch_size: int
    num_repeat: int
    slots: int
    completed_tasks: int
    completed_episodes: int
    running_episodes: int
    quarantined_episodes: int
    dropped_episodes: int
    tasks: dict[str, int] = Field(default={}, description="task_id -> finished episodes")


class ServerStatus(Model):
    """``GET /status``: everything a monitor shows."""

    engine: EngineStatus
    boot_stage: str = ""
    engine_seconds: float = Field(default=0.0, description="since the engine entered this state")
    engine_pid: int | None = None
    waiting_claims: int = Field(default=0, description="claims that long-poll for free episodes")
    last_lines: list[str] = Field(default=[], description="last output of a dead engine")
    model: str = ""
    pool: PoolInformation | None = None
    steps: list[StepResult] = Field(default=[], description="recent steps, oldest first")
    job: TrainJob | None = Field(default=None, description="as synced; what the engine runs unless it is OFFLINE")
    resolved_config: dict[str, Any] | None = None
