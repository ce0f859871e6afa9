"""What flows through the swarm: tasks, outputs, recorded calls, timelines, trajectories, batches.

Invariant: token data is exactly what vLLM sampled; nothing here is ever re-tokenised text.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator


class Model(BaseModel):
    """Base of every model of ours: frozen, and a misspelt field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Task(Model):
    """What an episode works on; episodes with one ``task_id`` form a GRPO group."""

    task_id: str = Field(min_length=1)
    main_query: str = ""
    init_messages: list[dict[str, Any]] = []
    env_type: str = ""
    metadata: dict[str, Any] = {}


class WorkflowOutput(Model):
    """The result of one episode: its reward and whatever the client wants logged with it."""

    reward: FiniteFloat
    is_success: bool | None = None
    # factories: pydantic makes a deep copy of a default that is mutable, for every end
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    log_metrics: dict[str, float] = Field(default_factory=dict[str, float])


#: what the journal has room for; vLLM's ids are below 2^31
_TokenId = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class ModelCall(Model):
    """One completed sampling call of an episode, as vLLM reported it.

    ``prompt_ids`` has P token ids; ``response_ids`` and ``logprobs`` have R entries each (natural log, of the
    token sampled). The policy versions are trainer steps: the oldest and newest weights that sampled a token.
    """

    call_id: str
    prompt_ids: list[_TokenId]
    response_ids: list[_TokenId]
    logprobs: list[float]
    min_policy_version: int
    max_policy_version: int
    finish_reason: str

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if len(self.response_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.response_ids)} token ids but {len(self.logprobs)} log-probabilities")
        return self


class Timeline(Model):
    """One linear token sequence with its loss mask.

    ``prompt_ids`` [P]; ``response_ids``, ``response_mask`` and ``logprobs`` [R]. The mask is 1 on tokens the policy
    sampled and 0 on tool or user tokens in between, whose log-probability is 0.0.
    """

    prompt_ids: list[int]
    response_ids: list[int] = Field(min_length=1)
    response_mask: list[int]
    logprobs: list[float]
    min_policy_version: int
    max_policy_version: int
    num_calls: int = Field(ge=1)

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if not len(self.response_ids) == len(self.response_mask) == len(self.logprobs):
            raise ValueError("response_ids, response_mask and logprobs must have one length")
        return self


class Trajectory(Model):
    """All timelines of one finished episode with its reward."""

    episode_uuid: str
    task_id: str
    reward: FiniteFloat
    timelines: list[Timeline] = Field(min_length=1)
    num_calls: int = Field(ge=1)
    log_metrics: dict[str, float] = {}


class TrainGroup(Model):
    """The finished episodes of one task: the unit over which GRPO computes its mean and deviation."""

    task_id: str
    trajectories: list[Trajectory] = Field(min_length=1)


class TrainBatch(Model):
    """What one training step consumes; ``batch_id`` identifies it for exactly-once accounting."""

    batch_id: str
    groups: list[TrainGroup] = Field(min_length=1)


class StepResult(Model):
    """What one training step of the engine did; ``step`` is the policy version its weights now serve as."""

    step: int
    batch_id: str
    metrics: dict[str, float]
    seconds: float
