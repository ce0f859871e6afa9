"""What flows through the swarm beside token data (see :mod:`swarm.tokens`): tasks, outputs, results of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

#: Called with the stage of a long piece of work, what is done, the total (``None``: unknown) and their unit.
OnProgress = Callable[[str, int, int | None, str], None]

#: The trainer's numbers are float32: a larger reward could be infinite there, and with it the loss of a whole step.
MOST_REWARD = 1e16
RewardNumber = Annotated[FiniteFloat, Field(ge=-MOST_REWARD, le=MOST_REWARD)]


class Model(BaseModel):
    """Base of every model of ours: frozen, and a misspelt field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TolerantModel(BaseModel):
    """Base of models whose sender may be newer: frozen, and what this program does not know is left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Task(Model):
    """What an episode works on; episodes with one ``task_id`` form a GRPO group."""

    task_id: str = Field(min_length=1)
    main_query: str = ""
    init_messages: list[dict[str, Any]] = []
    env_type: str = ""
    metadata: dict[str, Any] = {}

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What is asked, as chat messages: ``init_messages``, or else ``main_query`` as the user's."""
        return self.init_messages or [{"role": "user", "content": self.main_query}]


class Notes(TolerantModel):
    """What a gateway or a client notes of an episode, for people: nothing of it is trained."""

    group_id: str = Field(default="", description="of the answers that one call of the reward hook judged")
    hook: str = Field(default="", description="where that hook comes from")
    code: str = Field(default="", description="digest of that hook's code, or of the client's that ran the episode")
    request_id: str = ""
    route: str = ""
    session: str = Field(default="", description="the name of its conversation")
    key: str = Field(default="", description="id of the gateway's key that it came with")
    user: str = Field(default="", description="digest of the user whom the application names")
    traceparent: str = ""
    rank: int | None = Field(default=None, ge=1, lt=2**31, description="1 for the best of the group")
    reason: str = ""
    delivered: bool | None = Field(default=None, description="whether the user got it")
    task: dict[str, Any] | None = Field(default=None, description="of the group's first: main_query and metadata")


class WorkflowOutput(Model):
    """The result of one episode: its reward, which counts relative to its group, an advantage beside that (``credit``),
    and whatever the client wants logged with it."""

    reward: RewardNumber
    credit: RewardNumber = 0.0
    is_success: bool | None = None
    # factories: pydantic deep-copies a mutable default for every instance
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    log_metrics: dict[str, float] = Field(default_factory=dict[str, float])
    notes: Notes | None = None


class StepResult(Model):
    """What one training step of the engine did; ``step`` is the policy version its weights now serve as."""

    step: int
    batch_id: str
    metrics: dict[str, float]
    seconds: float


class EvalResult(Model):
    """What eval episodes measured of the weights of one policy version, ``step``; names as in :mod:`swarm.measures`."""

    step: int
    episodes: int
    metrics: dict[str, float]
