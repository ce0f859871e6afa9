import math

from hypothesis import given
from hypothesis import strategies as st

from swarm.server.journal.sqlite import clean, pack_call, pack_json, pack_trajectory, unpack_call, unpack_trajectory
from swarm.tokens import Timeline, Trajectory
from tests.token_data import model_call

INT32 = st.integers(-(2**31), 2**31 - 1)
IDS = st.lists(INT32, max_size=5)
FLOATS = st.floats(allow_nan=False, width=32)


@given(prompt=IDS, response=IDS, data=st.data())
def test_a_call_comes_back_exactly(prompt: list[int], response: list[int], data: st.DataObject) -> None:
    logprobs = data.draw(st.lists(FLOATS, min_size=len(response), max_size=len(response)))
    call = model_call(prompt, response, 1, 2, call_id="a", logprobs=logprobs, finish_reason="\ud800")
    assert unpack_call("a", pack_call(call)) == call


@given(response=st.lists(INT32, min_size=1, max_size=5), data=st.data())
def test_a_trajectory_comes_back_exactly(response: list[int], data: st.DataObject) -> None:
    same = {"min_size": len(response), "max_size": len(response)}
    timeline = Timeline(
        prompt_ids=[],
        response_ids=response,
        response_mask=data.draw(st.lists(st.booleans(), **same)),
        logprobs=data.draw(st.lists(FLOATS, **same)),
        min_policy_version=0,
        max_policy_version=7,
        num_calls=2,
    )
    metrics = data.draw(st.dictionaries(st.text(max_size=3), FLOATS, max_size=3))
    trajectory = Trajectory(
        episode_uuid="e",
        task_id="\ud800ß",
        reward=0.1,
        credit=-0.3,
        timelines=[timeline, timeline],
        num_calls=2,
        log_metrics=metrics,
    )
    assert unpack_trajectory("e", pack_trajectory(trajectory), None) == trajectory


def test_token_data_is_small() -> None:
    call = model_call([150_000] * 1000, [])
    assert len(pack_call(call)) < 4_100


def test_what_json_has_no_form_for_is_written_all_the_same() -> None:
    assert pack_json({"a": {1}, "b": "\ud800"}) == '{"a": "{1}", "b": "\\ud800"}'
    assert pack_json(math.inf) == "Infinity"


def test_sqlite_takes_any_text_that_is_clean() -> None:
    assert clean("ß\ud800x").encode() == "ß?x".encode()
