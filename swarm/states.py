"""The engine's states with the tables of their transitions, and the states of episodes.

Invariant: no state of the engine changes except through :meth:`EngineStates.after`.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import NamedTuple

from swarm.errors import StateError


class EngineState(StrEnum):
    """The engine in one word, as the wire has it; see :attr:`EngineStates.word`."""

    OFFLINE = "ENGINE.OFFLINE"
    BOOTING = "ENGINE.BOOTING"
    ROLLING = "ENGINE.ROLLING"
    ROLLING_POST = "ENGINE.ROLLING_POST"
    WEIGHT_SYNCING = "ENGINE.WEIGHT_SYNCING"


class VllmState(Enum):
    """What vLLM does for episodes. While it is ``PAUSED``, none begins: a batch leaves, or weights change."""

    DOWN = "down"
    UP = "up"
    PAUSED = "paused"


class TrainerState(Enum):
    """What the trainer does.

    ``AWAY``: there is none, or all its steps are done and vLLM serves on. ``BOOTING``: where vLLM serves, the one
    before died. ``IDLE``: it waits for a batch. ``COMPUTING``: a batch was taken for it. ``DONE``: its step is
    computed, and the weights go to vLLM; until it asks for a batch, vLLM may not go on without it.
    """

    AWAY = "away"
    BOOTING = "booting"
    IDLE = "idle"
    COMPUTING = "computing"
    DONE = "done"


class EngineEvent(Enum):
    """What can happen to the engine.

    ``ASK``: the trainer waits for a batch, ``LEAVE``: all its steps are done. ``CLOSE``: the batch is complete and
    running episodes may finish, ``REOPEN``: it was trained already, ``TAKE``: it leaves. ``SYNC`` and ``SYNCED``:
    weights change. ``DIE``: the trainer died beside a vLLM that serves. ``STOP``: nothing is left of the engine.
    """

    BOOT = "boot"
    ASK = "ask for a batch"
    LEAVE = "be done with all steps"
    CLOSE = "complete a batch"
    REOPEN = "collect on"
    TAKE = "take a batch"
    SYNC = "begin a weight sync"
    SYNCED = "end a weight sync"
    DIE = "go on with another trainer"
    STOP = "stop"


class EpisodeState(StrEnum):
    """State of one episode; the journal stores these words.

    An episode is ``CLAIMED`` while it runs. ``REGISTERED`` and ``DELETED`` end one of which nothing is trained: its
    slot is offered again (the engine was ROLLING), or not. ``FINISHED`` waits for a batch and ``BATCHED`` is in the
    batch that is out; ``TRAINED`` and ``DROPPED`` are final.
    """

    REGISTERED = "registered"
    CLAIMED = "claimed"
    FINISHED = "finished"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"
    DELETED = "deleted"


#: event -> vLLM before and after it
VLLM_TRANSITIONS: dict[EngineEvent, dict[VllmState, VllmState]] = {
    EngineEvent.BOOT: {VllmState.DOWN: VllmState.DOWN},
    EngineEvent.ASK: dict.fromkeys(VllmState, VllmState.UP),
    EngineEvent.LEAVE: dict.fromkeys(VllmState, VllmState.UP),
    EngineEvent.CLOSE: {VllmState.UP: VllmState.PAUSED},
    EngineEvent.REOPEN: {VllmState.PAUSED: VllmState.UP},
    # where episodes run on while the trainer computes, no batch is ever closed
    EngineEvent.TAKE: {VllmState.UP: VllmState.UP, VllmState.PAUSED: VllmState.PAUSED},
    EngineEvent.SYNC: {
        VllmState.DOWN: VllmState.DOWN,
        VllmState.UP: VllmState.PAUSED,
        VllmState.PAUSED: VllmState.PAUSED,
    },
    EngineEvent.SYNCED: {VllmState.PAUSED: VllmState.UP},
    EngineEvent.DIE: {VllmState.UP: VllmState.UP, VllmState.PAUSED: VllmState.UP},
    EngineEvent.STOP: dict.fromkeys(VllmState, VllmState.DOWN),
}
_AT_WORK = (TrainerState.IDLE, TrainerState.COMPUTING, TrainerState.DONE)
#: event -> trainer before and after it
TRAINER_TRANSITIONS: dict[EngineEvent, dict[TrainerState, TrainerState]] = {
    EngineEvent.BOOT: {TrainerState.AWAY: TrainerState.BOOTING},
    EngineEvent.ASK: dict.fromkeys((TrainerState.BOOTING, *_AT_WORK), TrainerState.IDLE),
    EngineEvent.LEAVE: dict.fromkeys((TrainerState.BOOTING, *_AT_WORK), TrainerState.AWAY),
    EngineEvent.CLOSE: {TrainerState.IDLE: TrainerState.IDLE},
    EngineEvent.REOPEN: {TrainerState.IDLE: TrainerState.IDLE},
    EngineEvent.TAKE: {TrainerState.IDLE: TrainerState.COMPUTING},
    EngineEvent.SYNC: {TrainerState.BOOTING: TrainerState.BOOTING, **dict.fromkeys(_AT_WORK, TrainerState.DONE)},
    EngineEvent.SYNCED: {TrainerState.DONE: TrainerState.DONE},
    EngineEvent.DIE: dict.fromkeys(
        (TrainerState.AWAY, TrainerState.BOOTING, TrainerState.IDLE, TrainerState.COMPUTING), TrainerState.BOOTING
    ),
    EngineEvent.STOP: dict.fromkeys(TrainerState, TrainerState.AWAY),
}


class EngineStates(NamedTuple):
    """The whole truth of the engine. ``always`` is no state: episodes run on while this engine's trainer computes."""

    vllm: VllmState = VllmState.DOWN
    trainer: TrainerState = TrainerState.AWAY
    always: bool = False

    def after(self, event: EngineEvent) -> EngineStates:
        """The states after ``event``.

        Raises:
            StateError: it cannot happen in these.
        """
        try:
            vllm = VLLM_TRANSITIONS[event][self.vllm]
            return self._replace(vllm=vllm, trainer=TRAINER_TRANSITIONS[event][self.trainer])
        except KeyError:
            raise StateError(f"the engine cannot {event.value} while it is {self.word}") from None

    @property
    def word(self) -> EngineState:
        """Both states in the word that the wire has for them."""
        if self.trainer is TrainerState.BOOTING:
            return EngineState.BOOTING
        if self.vllm is VllmState.PAUSED:
            return EngineState.ROLLING_POST if self.trainer is TrainerState.IDLE else EngineState.WEIGHT_SYNCING
        return EngineState.ROLLING if self.vllm is VllmState.UP else EngineState.OFFLINE

    @property
    def outlives_trainer(self) -> bool:
        """Whether vLLM serves on if the trainer dies: no transfer of weights is under way."""
        waits = self.vllm is VllmState.UP and self.trainer is not TrainerState.DONE
        return waits or self.trainer in (TrainerState.IDLE, TrainerState.COMPUTING)

    @property
    def trained_out(self) -> bool:
        """Whether all steps are done and vLLM serves on."""
        return self.vllm is VllmState.UP and self.trainer is TrainerState.AWAY
