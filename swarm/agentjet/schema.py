"""AgentJet's names for what flows through an episode: its task, its output, the address where it samples.

Invariant: tasks of equal content are one task, with or without an id, so that their episodes form one group.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from swarm import types
from swarm.data import task_digest
from swarm.errors import ConfigError

#: Begins the answer that stands for one to a prompt that is too long.
TOKEN_OVERFLOW = "Exceeded max model context length. token_overflow"


class Task(BaseModel):
    """What an episode works on. Without ``task_id``, its content names it, see :func:`task_id_of`."""

    model_config = ConfigDict(extra="allow")

    main_query: str = ""
    init_messages: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    task_id: str = ""
    env_type: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])


class WorkflowTask(BaseModel):
    """What a workflow's ``execute`` gets."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    env_type: str = ""
    task_id: str = ""
    episode_uuid: str = ""
    task: Task = Field(default_factory=Task)
    gym_env: Any = None


class WorkflowOutput(BaseModel):
    """What an agent returns; an episode can end only with a finite number as its reward."""

    reward: float | list[float] | None = None
    is_success: bool | None = None
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    log_metrics: dict[str, Any] = Field(default_factory=dict[str, Any])


class OpenaiBaseUrlAndApiKey(BaseModel):
    """Where an episode samples."""

    base_url: str
    api_key: str
    model: str = "policy"
    episode_uuid: str = ""

    def as_raw_openai_sdk_client(self) -> Any:
        """An ``openai.AsyncOpenAI`` for the episode."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key)

    @staticmethod
    def as_agentscope_model(*_: Any, **__: Any) -> Any:
        """Not here: this needs AgentScope's own class.

        Raises:
            ConfigError: always; says what to use.
        """
        raise ConfigError(
            "as_agentscope_model() is not known here: give AgentScope's OpenAIChatModel the episode's base_url and "
            "api_key"
        )


def task_id_of(task: Task | types.Task | str) -> str:
    """The id of ``task``; of one without an id, a digest of its content.

    Raises:
        ConfigError: the task is empty, so nothing tells it from another one.
    """
    if isinstance(task, str):
        return task
    if task.task_id:
        return task.task_id
    fields = task.model_dump(exclude={"task_id"})
    # a number tells tasks apart, also one that is zero
    content = {name: value for name, value in fields.items() if value or isinstance(value, int | float)}
    if not content:
        raise ConfigError("the task is empty: give it a task_id, so that its episodes form one group")
    return task_digest(content, "the task")


def is_token_overflow_message(content: Any) -> bool:
    """Whether an answer's text, or the message that holds it, says that the prompt was too long for the model."""
    if isinstance(content, dict):
        content = content.get("content")
    if isinstance(content, bytes | bytearray):
        content = content.decode(errors="replace")
    return isinstance(content, str) and TOKEN_OVERFLOW in content
