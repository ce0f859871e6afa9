"""Messages of the engine link and their framing: one frame ``[msgpack {"kind": ..., ...}]`` per message; the arrays of
a batch are its bins.

Engine processes (roles ``driver`` and ``rollout``) connect DEALER sockets to the server's ROUTER and present the
token that the server put into their environment; anything before a valid ``Hello`` is dropped.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from swarm.errors import LinkError
from swarm.job import ServingMode
from swarm.link.imported import ImportedCode
from swarm.tokens import READERS, TrainBatch
from swarm.types import EvalResult, StepResult

Role = Literal["driver", "rollout"]


class _Message(Struct, frozen=True, kw_only=True, tag_field="kind", tag=True, forbid_unknown_fields=True):
    """Base of all messages; ``kind`` on the wire is the name of the class."""


class Hello(_Message, frozen=True, kw_only=True):
    """First message of each engine process."""

    role: Role
    token: str
    pid: int


class Heartbeat(_Message, frozen=True, kw_only=True):
    """Sent by both ends every second; an end that is silent for longer than the other allows counts as dead."""


class BootProgress(_Message, frozen=True, kw_only=True):
    """What the engine does while it boots, in words for people."""

    stage: str
    detail: str = ""


class Warned(_Message, frozen=True, kw_only=True):
    """A warning for people; the run goes on."""

    text: str


class ResolvedConfig(_Message, frozen=True, kw_only=True):
    """verl's complete configuration, sent before anything heavy starts."""

    config: dict[str, Any]


class CodeImported(_Message, frozen=True, kw_only=True):
    """What the engine's processes import of the synced code, before the first ``RolloutReady``.

    ``processes`` has the answer of :func:`swarm.link.imported.imported` in each process that was asked, by what it is.
    """

    processes: dict[str, ImportedCode]


class RolloutReady(_Message, frozen=True, kw_only=True):
    """vLLM serves with weights of ``policy_version`` and the trainer wants a batch for the next step.

    ``addresses`` are ``host:port`` of each replica's OpenAI server; ``model`` is the name vLLM serves under.
    ``last_batch`` is the id of the batch that the trainer got last in this life, empty before the first: the batch that
    was given after it is the answer to this request, so that a repetition gets that one again, and no other.
    ``stays_awake`` tells that vLLM serves while the trainer computes; else it has to give its memory away meanwhile.
    ``serving`` is when episodes run.
    """

    addresses: Annotated[list[str], Meta(min_length=1)]
    model: str
    policy_version: int
    next_step: int
    last_batch: str = ""
    stays_awake: bool = True
    serving: ServingMode = "between_steps"


class WeightSync(_Message, frozen=True, kw_only=True):
    """vLLM, which is awake, pauses now, to get new weights."""


class WeightsSynced(_Message, frozen=True, kw_only=True):
    """vLLM has the weights of ``policy_version`` and is paused until the server answers with :class:`Resume`, so that
    no token of the new weights is taken for one of the old.

    ``sampled`` is as in :class:`swarm.tokens.WeightSyncs`, with all requests that vLLM holds and those that have ended
    since the last sync.
    """

    policy_version: int
    sampled: dict[str, dict[int, int]] | None = None


class StepDone(_Message, frozen=True, kw_only=True):
    """A training step is complete and its weights are in vLLM."""

    result: StepResult


class TrainerDied(_Message, frozen=True, kw_only=True):
    """From ``driver``: the trainer is gone because of ``error``, and with it the role ``rollout``; vLLM is left as it
    was. The driver waits for :class:`StartTrainer` or :class:`Stop`."""

    error: str


class Goodbye(_Message, frozen=True, kw_only=True):
    """The engine leaves: on purpose (``error`` empty) or because of ``error``; with ``wrong_config`` the job is at
    fault, so another start would fail alike. ``cause`` is the first exception of vLLM's core, in one line, where the
    engine died of that."""

    error: str = ""
    wrong_config: bool = False
    cause: str = ""


class BatchReady(_Message, frozen=True, kw_only=True):
    """Server to ``rollout``: the batch for the step that ``RolloutReady`` announced, and what was evaluated since the
    last one, for the trainer's loggers. ``newest_step`` is the latest that the run has done, also if its weights were
    lost: then tokens that they sampled wait under the same number as those of the step that is done in its place."""

    batch: TrainBatch
    evaluations: list[EvalResult] = []
    newest_step: int = 0


class Resume(_Message, frozen=True, kw_only=True):
    """Server to ``rollout``: the new policy version is known, vLLM may go on."""


class StartTrainer(_Message, frozen=True, kw_only=True):
    """Server to ``driver``, after :class:`TrainerDied`: start another trainer beside the vLLM that serves, with
    ``resume`` from the last checkpoint."""

    resume: bool


class Stop(_Message, frozen=True, kw_only=True):
    """Server to both roles: finish now; ``evaluations`` as of :class:`BatchReady`."""

    evaluations: list[EvalResult] = []


Message = (
    Hello
    | Heartbeat
    | BootProgress
    | Warned
    | ResolvedConfig
    | CodeImported
    | RolloutReady
    | WeightSync
    | WeightsSynced
    | StepDone
    | TrainerDied
    | Goodbye
    | BatchReady
    | Resume
    | StartTrainer
    | Stop
)


def encode(message: Message) -> bytes:
    """The single frame that carries ``message``."""
    return _ENCODER.encode(message)


def decode(frame: bytes) -> Message:
    """The message in ``frame``.

    Raises:
        LinkError: not msgpack, an unknown kind, or fields that do not fit.
    """
    try:
        return _DECODER.decode(frame)
    except msgspec.DecodeError as exc:
        raise LinkError(f"undecodable link message: {exc}") from exc


def _to_wire(value: Any) -> Any:
    if isinstance(value, StepResult | EvalResult):
        return value.model_dump()
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).data
    raise NotImplementedError(f"a link message cannot carry a {type(value).__name__}")


def _from_wire(kind: Any, value: Any) -> Any:
    return kind.model_validate(value) if kind in (StepResult, EvalResult) else READERS[kind](value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, dec_hook=_from_wire)
