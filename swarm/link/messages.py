"""Messages of the engine link and their framing: one frame ``[msgpack {"kind": ..., ...}]`` per message.

Engine processes (roles ``driver`` and ``rollout``) connect DEALER sockets to the server's ROUTER and present the
token that the server put into their environment; anything before a valid ``Hello`` is dropped.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from swarm.errors import LinkError
from swarm.types import Model, StepResult, TrainBatch

Role = Literal["driver", "rollout"]


class Hello(Model):
    """First message of each engine process."""

    kind: Literal["hello"] = "hello"
    role: Role
    token: str
    pid: int


class Heartbeat(Model):
    """Sent by both ends every second; silence for 5 s means the other end is dead."""

    kind: Literal["heartbeat"] = "heartbeat"


class BootProgress(Model):
    """What the engine is doing while it boots, for people."""

    kind: Literal["boot_progress"] = "boot_progress"
    stage: str
    detail: str = ""


class ResolvedConfig(Model):
    """verl's configuration as it will run, before anything heavy starts."""

    kind: Literal["resolved_config"] = "resolved_config"
    config: dict[str, Any]


class CodeImported(Model):
    """Where the engine's processes import the synced code from, before the first ``RolloutReady``.

    ``processes`` has the answer of :func:`swarm.link.code.imported` in each process that was asked, by what it is.
    """

    kind: Literal["code_imported"] = "code_imported"
    processes: dict[str, dict[str, str]]


class RolloutReady(Model):
    """vLLM serves with weights of ``policy_version`` and the trainer wants a batch for the next step.

    ``addresses`` are ``host:port`` of each replica's OpenAI server; ``model`` is the name vLLM serves under.
    ``last_batch`` is the id of the batch that the trainer got last in this life, empty before the first: the batch that
    was given after it is the answer to this request, so that a repetition gets that one again, and no other.
    ``stays_awake`` tells that vLLM serves while the trainer computes; else it has to give its memory away meanwhile.
    """

    kind: Literal["rollout_ready"] = "rollout_ready"
    addresses: list[str] = Field(min_length=1)
    model: str
    policy_version: int
    next_step: int
    last_batch: str = ""
    stays_awake: bool = True


class StepDone(Model):
    """A training step is complete and its weights are in vLLM."""

    kind: Literal["step_done"] = "step_done"
    result: StepResult


class Finished(Model):
    """The engine leaves: on purpose (``error`` empty) or because of ``error``."""

    kind: Literal["finished"] = "finished"
    error: str = ""
    wrong_config: bool = Field(default=False, description="the job is at fault: another start fails alike")


class BatchReady(Model):
    """Server to ``rollout``: the batch for the step that ``RolloutReady`` announced."""

    kind: Literal["batch_ready"] = "batch_ready"
    batch: TrainBatch


class Stop(Model):
    """Server to both roles: finish now."""

    kind: Literal["stop"] = "stop"


Message = Annotated[
    Hello
    | Heartbeat
    | BootProgress
    | ResolvedConfig
    | CodeImported
    | RolloutReady
    | StepDone
    | Finished
    | BatchReady
    | Stop,
    Field(discriminator="kind"),
]
_adapter: TypeAdapter[Message] = TypeAdapter(Message)


def encode(message: Message) -> bytes:
    """The single frame that carries ``message``."""
    frame = msgpack.packb(message.model_dump(mode="json"))
    assert frame is not None  # None only when packing into a given buffer
    return frame


def decode(frame: bytes) -> Message:
    """The message in ``frame``.

    Raises:
        LinkError: not msgpack, an unknown kind, or fields that do not fit.
    """
    try:
        return _adapter.validate_python(msgpack.unpackb(frame))
    except (ValidationError, ValueError, msgpack.UnpackException) as exc:
        raise LinkError(f"undecodable link message: {exc}") from exc
