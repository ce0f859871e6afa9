"""The transition tables hold what the design says and nothing else."""

import pytest

from swarm.errors import StateError
from swarm.states import EngineState, EpisodeEvent, EpisodeState, check_engine, next_episode

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


@pytest.mark.parametrize("current", EngineState)
@pytest.mark.parametrize("target", EngineState)
def test_engine_transitions(current: EngineState, target: EngineState) -> None:
    if (current, target) in ALLOWED:
        assert check_engine(current, target) is target
    else:
        with pytest.raises(StateError, match="cannot go"):
            check_engine(current, target)


@pytest.mark.parametrize("engine", EngineState)
def test_a_claim_needs_a_rolling_engine(engine: EngineState) -> None:
    if engine is EngineState.ROLLING:
        assert next_episode(EpisodeState.REGISTERED, EpisodeEvent.CLAIM, engine) is EpisodeState.CLAIMED
    else:
        with pytest.raises(StateError, match="only while"):
            next_episode(EpisodeState.REGISTERED, EpisodeEvent.CLAIM, engine)


@pytest.mark.parametrize(
    "event", [EpisodeEvent.END_EVAL, EpisodeEvent.ABORT, EpisodeEvent.IDLE_TIMEOUT, EpisodeEvent.CAP]
)
def test_a_freed_slot_is_offered_again_only_while_rolling(event: EpisodeEvent) -> None:
    assert next_episode(EpisodeState.CLAIMED, event, EngineState.ROLLING) is EpisodeState.REGISTERED
    assert next_episode(EpisodeState.CLAIMED, event, EngineState.ROLLING_POST) is EpisodeState.DELETED


@pytest.mark.parametrize("engine", EngineState)
def test_what_the_engine_goes_on_without_is_deleted(engine: EngineState) -> None:
    assert next_episode(EpisodeState.CLAIMED, EpisodeEvent.ENGINE, engine) is EpisodeState.DELETED


@pytest.mark.parametrize("engine", EngineState)
def test_a_running_episode_may_finish_in_any_state_of_the_engine(engine: EngineState) -> None:
    assert next_episode(EpisodeState.CLAIMED, EpisodeEvent.END_TRAIN, engine) is EpisodeState.FINISHED


def test_a_finished_episode_is_batched_then_trained_or_dropped() -> None:
    batched = next_episode(EpisodeState.FINISHED, EpisodeEvent.TAKE)
    assert next_episode(batched, EpisodeEvent.STEP) is EpisodeState.TRAINED
    for state in (EpisodeState.FINISHED, batched):
        assert next_episode(state, EpisodeEvent.DROP) is EpisodeState.DROPPED
    assert next_episode(EpisodeState.CLAIMED, EpisodeEvent.END_UNTRAINABLE) is EpisodeState.DROPPED


LATER = {EpisodeEvent.TAKE, EpisodeEvent.STEP, EpisodeEvent.DROP}


@pytest.mark.parametrize("state", [state for state in EpisodeState if state is not EpisodeState.CLAIMED])
@pytest.mark.parametrize("event", [event for event in EpisodeEvent if event not in {EpisodeEvent.CLAIM, *LATER}])
def test_only_a_claimed_episode_can_end(state: EpisodeState, event: EpisodeEvent) -> None:
    with pytest.raises(StateError, match="cannot"):
        next_episode(state, event, EngineState.ROLLING)


@pytest.mark.parametrize("state", [EpisodeState.TRAINED, EpisodeState.DROPPED, EpisodeState.DELETED])
@pytest.mark.parametrize("event", EpisodeEvent)
def test_final_states_are_final(state: EpisodeState, event: EpisodeEvent) -> None:
    with pytest.raises(StateError, match="cannot"):
        next_episode(state, event)
