"""Engine and episode states and the one table of their transitions; everything else asks it.

Invariant: no state changes except through :func:`check_engine` or :func:`check_episode`.
"""

from __future__ import annotations

from enum import StrEnum

from swarm.errors import StateError


class EngineState(StrEnum):
    """State of the training engine; the values are the words on the wire."""

    OFFLINE = "ENGINE.OFFLINE"
    BOOTING = "ENGINE.BOOTING"
    ROLLING = "ENGINE.ROLLING"
    ROLLING_POST = "ENGINE.ROLLING_POST"
    WEIGHT_SYNCING = "ENGINE.WEIGHT_SYNCING"


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


#: Where vLLM may outlive its trainer: BOOTING is the start of another trainer then.
_SERVES = frozenset({EngineState.BOOTING, EngineState.OFFLINE})
#: engine state -> states it may go to. Every state may go to OFFLINE (stop, crash).
ENGINE_TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.OFFLINE: frozenset({EngineState.BOOTING}),
    EngineState.BOOTING: frozenset({EngineState.ROLLING, EngineState.OFFLINE}),
    # straight to WEIGHT_SYNCING where episodes go on while the trainer computes
    EngineState.ROLLING: _SERVES | {EngineState.ROLLING_POST, EngineState.WEIGHT_SYNCING},
    # back to ROLLING if a late report says that the batch which is about to leave was trained already
    EngineState.ROLLING_POST: _SERVES | {EngineState.WEIGHT_SYNCING, EngineState.ROLLING},
    EngineState.WEIGHT_SYNCING: _SERVES | {EngineState.ROLLING},
}

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


def check_engine(current: EngineState, target: EngineState) -> EngineState:
    """Return ``target`` if the engine may go there from ``current``.

    Raises:
        StateError: the transition is not in the table.
    """
    if target not in ENGINE_TRANSITIONS[current]:
        raise StateError(f"the engine cannot go from {current} to {target}")
    return target


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
