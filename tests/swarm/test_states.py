"""The transition tables hold what the design says and nothing else."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import StateError
from swarm.states import (
    EngineEvent,
    EngineState,
    EngineStates,
    TrainerState,
    VllmState,
)

CYCLE = [
    (EngineState.OFFLINE, EngineState.BOOTING),
    (EngineState.BOOTING, EngineState.ROLLING),
    (EngineState.ROLLING, EngineState.ROLLING_POST),
    (EngineState.ROLLING_POST, EngineState.WEIGHT_SYNCING),
    (EngineState.WEIGHT_SYNCING, EngineState.ROLLING),
]
#: the batch that was about to leave is trained already
BACK = (EngineState.ROLLING_POST, EngineState.ROLLING)
#: where episodes run while the trainer computes, there is nothing to wait for
STRAIGHT = (EngineState.ROLLING, EngineState.WEIGHT_SYNCING)
#: another trainer is started beside a vLLM that serves
AGAIN = [(state, EngineState.BOOTING) for state, _ in CYCLE[2:]]
ALLOWED = {
    *CYCLE,
    *AGAIN,
    BACK,
    STRAIGHT,
    *((state, EngineState.OFFLINE) for state in EngineState if state is not EngineState.OFFLINE),
}


def reachable() -> dict[EngineStates, dict[EngineEvent, EngineStates]]:
    """All states of an engine with what each event makes of them."""
    found: dict[EngineStates, dict[EngineEvent, EngineStates]] = {}
    new = {EngineStates()}
    while new:
        states = new.pop()
        found[states] = {}
        for event in EngineEvent:
            with contextlib.suppress(StateError):
                found[states][event] = states.after(event)
        new |= {*found[states].values()} - found.keys()
    return found


def test_the_word_changes_as_the_design_says_and_not_otherwise() -> None:
    changes = {(before.word, after.word) for before, events in reachable().items() for after in events.values()}
    assert {change for change in changes if change[0] is not change[1]} == ALLOWED


def test_each_pair_of_states_that_an_engine_can_be_in_has_one_word() -> None:
    down, up, paused = VllmState
    away, booting, idle, computing, done = TrainerState
    words = {(serving, trainer): EngineStates(serving, trainer).word for serving, trainer, _ in reachable()}
    assert words == {
        (down, away): EngineState.OFFLINE,
        **dict.fromkeys([(serving, booting) for serving in VllmState], EngineState.BOOTING),
        **dict.fromkeys([(up, trainer) for trainer in (away, idle, computing, done)], EngineState.ROLLING),
        (paused, idle): EngineState.ROLLING_POST,
        **dict.fromkeys([(paused, trainer) for trainer in (computing, done)], EngineState.WEIGHT_SYNCING),
    }


def test_what_cannot_happen_is_refused_in_words() -> None:
    with pytest.raises(StateError, match=r"cannot take a batch while it is ENGINE\.OFFLINE"):
        EngineStates().after(EngineEvent.TAKE)


@given(st.lists(st.sampled_from(EngineEvent)))
def test_vllm_outlives_a_trainer_unless_weights_change(events: list[EngineEvent]) -> None:
    """Since it booted, or since the trainer asked or died, there was no transfer."""
    states, transfer = EngineStates(), False
    for event in events:
        with contextlib.suppress(StateError):
            states = states.after(event)
            transfer = event is EngineEvent.SYNC or (transfer and event in (EngineEvent.TAKE, EngineEvent.SYNCED))
        serves = states.vllm is not VllmState.DOWN
        assert states.outlives_trainer == (serves and not transfer)
        assert (EngineEvent.DIE in reachable()[states]) >= states.outlives_trainer
