"""Engine and episode states and the tables of their transitions; everything else asks them.

Invariant: no state changes except through :meth:`EngineStates.after` or :func:`next_episode`.
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

    ``REGISTERED`` and ``DELETED`` end an episode of which nothing is trained: its slot is offered again, or not.
    ``FINISHED`` waits for a batch and ``BATCHED`` is in the batch that is out; ``TRAINED`` and ``DROPPED`` are final.
    """

    # the state is a dictionary key for each event of each episode: Enum's own hash is a Python call
    __hash__ = str.__hash__

    REGISTERED = "registered"
    CLAIMED = "claimed"
    FINISHED = "finished"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"
    DELETED = "deleted"


class EpisodeEvent(StrEnum):
    """What can happen to an episode.

    ``END_UNTRAINABLE`` is an end with a result that cannot be trained, ``CAP`` the end of its wall-clock time and
    ``ENGINE`` a weight sync or a new run that goes on without it. ``TAKE`` puts it into a batch, ``STEP`` is the
    recorded step of that batch, and ``DROP`` decides that it will never be trained.
    """

    __hash__ = str.__hash__

    CLAIM = "claim"
    END_TRAIN = "end_train"
    END_UNTRAINABLE = "end_untrainable"
    END_EVAL = "end_eval"
    ABORT = "abort"
    IDLE_TIMEOUT = "idle_timeout"
    CAP = "cap"
    ENGINE = "engine"
    TAKE = "take"
    STEP = "step"
    DROP = "drop"


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


#: (episode state, event) -> next state while the engine is ROLLING; ends are accepted in any engine state.
EPISODE_TRANSITIONS: dict[tuple[EpisodeState, EpisodeEvent], EpisodeState] = {
    (EpisodeState.REGISTERED, EpisodeEvent.CLAIM): EpisodeState.CLAIMED,
    (EpisodeState.CLAIMED, EpisodeEvent.END_TRAIN): EpisodeState.FINISHED,
    (EpisodeState.CLAIMED, EpisodeEvent.END_UNTRAINABLE): EpisodeState.DROPPED,
    (EpisodeState.CLAIMED, EpisodeEvent.END_EVAL): EpisodeState.REGISTERED,
    (EpisodeState.CLAIMED, EpisodeEvent.ABORT): EpisodeState.REGISTERED,
    (EpisodeState.CLAIMED, EpisodeEvent.IDLE_TIMEOUT): EpisodeState.REGISTERED,
    (EpisodeState.CLAIMED, EpisodeEvent.CAP): EpisodeState.REGISTERED,
    (EpisodeState.CLAIMED, EpisodeEvent.ENGINE): EpisodeState.DELETED,
    (EpisodeState.FINISHED, EpisodeEvent.TAKE): EpisodeState.BATCHED,
    (EpisodeState.FINISHED, EpisodeEvent.DROP): EpisodeState.DROPPED,
    (EpisodeState.BATCHED, EpisodeEvent.STEP): EpisodeState.TRAINED,
    (EpisodeState.BATCHED, EpisodeEvent.DROP): EpisodeState.DROPPED,
}

#: Outside ROLLING a slot that becomes free is deleted instead of offered again.
_FREED = frozenset({EpisodeEvent.END_EVAL, EpisodeEvent.ABORT, EpisodeEvent.IDLE_TIMEOUT, EpisodeEvent.CAP})


def next_episode(current: EpisodeState, event: EpisodeEvent, engine: EngineState = EngineState.ROLLING) -> EpisodeState:
    """The state after ``event`` happens to an episode in state ``current``, while the engine is in state ``engine``.

    Raises:
        StateError: the event cannot happen in that state, or a claim outside ROLLING.
    """
    if event is EpisodeEvent.CLAIM and engine is not EngineState.ROLLING:
        raise StateError(f"episodes can be claimed only while the engine is {EngineState.ROLLING}, not {engine}")
    try:
        target = EPISODE_TRANSITIONS[current, event]
    except KeyError:
        raise StateError(f"an episode that is {current} cannot {event}") from None
    if event in _FREED and engine is not EngineState.ROLLING:
        return EpisodeState.DELETED
    return target
