"""Merging of calls into timelines: exact on ids, nothing lost, nothing twice."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from swarm.server.episodes.timelines import count_tokens, merge_calls
from swarm.tokens import ModelCall, Timeline
from tests import token_data


def call(prompt: list[int], response: list[int], version: int = 0, newest: int | None = None) -> ModelCall:
    return token_data.model_call(
        prompt, response, version, newest, logprobs=[-(i + 1) / 8 for i in range(len(response))]
    )


def full(timeline: Timeline) -> list[int]:
    return [*timeline.prompt_ids.tolist(), *timeline.response_ids.tolist()]


def ids(call: ModelCall) -> tuple[int, ...]:
    return (*call.prompt_ids.tolist(), *call.response_ids.tolist())


def test_one_call_is_one_timeline() -> None:
    assert merge_calls([call([1, 2], [3, 4], 5)]) == [token_data.timeline([1, 2], [3, 4], 5, logprobs=[-0.125, -0.25])]


def test_next_turn_extends_with_masked_tokens_in_between() -> None:
    (timeline,) = merge_calls([call([1], [2, 3], 4), call([1, 2, 3, 8, 9], [5], 5, 6)])
    assert full(timeline) == [1, 2, 3, 8, 9, 5]
    assert timeline.prompt_ids.tolist() == [1]
    assert timeline.response_mask.tolist() == [1, 1, 0, 0, 1]
    assert timeline.logprobs.tolist() == [-0.125, -0.25, 0.0, 0.0, -0.125]
    assert (timeline.min_policy_version, timeline.max_policy_version, timeline.num_calls) == (4, 6, 2)


def test_each_token_keeps_its_version_when_calls_are_joined() -> None:
    over_a_sync = replace(call([1], [2, 3, 4], 4, 5), versions=[(0, 4), (2, 5)])
    (timeline,) = merge_calls([over_a_sync, call([1, 2, 3, 4, 9], [6, 7], 5), call([1, 2, 3, 4, 9, 6, 7], [8], 6)])
    assert timeline.versions == [(0, 4), (2, 5), (6, 6)]
    assert timeline.token_versions().tolist() == [4, 4, 5, 5, 5, 5, 6]
    assert merge_calls([over_a_sync])[0].versions == over_a_sync.versions


def test_drifted_prefix_starts_a_new_timeline() -> None:
    # the app re-rendered its history: one token of the first answer came back different
    timelines = merge_calls([call([1], [2, 3]), call([1, 2, 4, 8], [5])])
    assert [full(t) for t in timelines] == [[1, 2, 3], [1, 2, 4, 8, 5]]
    assert [t.response_mask.tolist() for t in timelines] == [[1, 1], [1]]


def test_two_branches_train_the_shared_answer_once() -> None:
    timelines = merge_calls([call([1], [2]), call([1, 2, 7], [3]), call([1, 2, 8], [4])])
    assert [full(t) for t in timelines] == [[1, 2, 7, 3], [1, 2, 8, 4]]
    assert [t.response_mask.tolist() for t in timelines] == [[1, 0, 1], [1]]


def test_calls_without_tokens_add_nothing() -> None:
    assert merge_calls([]) == []
    assert merge_calls([call([1, 2], [])]) == []


def again(prompt: list[int], response: list[int]) -> ModelCall:
    """A call that its caller's SDK repeats."""
    return replace(call(prompt, response), history="again")


def test_an_answer_that_went_astray_is_not_trained() -> None:
    lost, retry, next_turn = call([1], [2, 3]), again([1], [4]), call([1, 4, 8], [5])
    (timeline,) = timelines = merge_calls([lost, retry, next_turn])
    assert full(timeline) == [1, 4, 8, 5]
    counts = count_tokens([lost, retry, next_turn], timelines)
    assert (counts.calls, counts.sampled, counts.trained, counts.repeated) == (3, 4, 2, 2)
    # also where it came later than the retry's, and where that went astray too
    assert [full(t) for t in merge_calls([retry, lost])] == [[1, 4]]
    assert [full(t) for t in merge_calls([lost, retry, again([1], [6])])] == [[1, 6]]


def test_a_retry_replaces_no_answer_of_which_its_caller_may_have_heard() -> None:
    # the first try was refused, or an answer to another prompt is beside it
    assert len(merge_calls([again([1], [4])])) == 1
    assert len(merge_calls([call([2], [3]), again([1], [4])])) == 2
    # samples of one prompt that ran at once: it is not known which of them was asked for again
    assert len(merge_calls([call([1], [2]), call([1], [3]), again([1], [4])])) == 3


#: a tiny alphabet makes shared prefixes common
tokens = st.lists(st.integers(0, 2), max_size=5)
calls_strategy = st.lists(st.builds(call, tokens, tokens, st.integers(0, 3)), max_size=8)


@st.composite
def conversations(draw: st.DrawFn) -> list[ModelCall]:
    """Calls most of which continue an earlier one, as agents do, in any order of completion."""
    calls: list[ModelCall] = []
    for _ in range(draw(st.integers(1, 8))):
        prompt = draw(tokens)
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            prompt = [*ids(earlier), *prompt]
        calls.append(call(prompt, draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)), draw(st.integers(0, 3))))
    return draw(st.permutations(calls))


@given(st.one_of(calls_strategy, conversations()))
@settings(max_examples=400)
def test_every_sampled_token_is_trained(calls: list[ModelCall]) -> None:
    timelines = merge_calls(calls)
    sampled = {  # a token is identified by all ids before it and itself
        ids(c)[: len(c.prompt_ids) + i + 1] for c in calls for i in range(len(c.response_ids))
    }
    trained: list[tuple[int, ...]] = []
    for timeline in timelines:
        whole = full(timeline)
        for i, mask in enumerate(timeline.response_mask):
            if mask:
                trained.append(tuple(whole[: len(timeline.prompt_ids) + i + 1]))
            else:
                assert timeline.logprobs[i] == 0.0
    assert set(trained) == sampled
    # several times only where different calls sampled the same token after the same ids
    for position in set(trained):
        samples = {
            (len(c.prompt_ids), ids(c))
            for c in calls
            if len(c.prompt_ids) < len(position) and ids(c)[: len(position)] == position
        }
        assert trained.count(position) <= len(samples)


@given(st.one_of(calls_strategy, conversations()))
@settings(max_examples=200)
def test_every_token_is_accounted_for(calls: list[ModelCall]) -> None:
    timelines = merge_calls(calls)
    counts = count_tokens(calls, timelines)
    assert counts.sampled == sum(len(one.response_ids) for one in calls) == counts.trained + counts.repeated
    assert counts.prompts + counts.masked + counts.trained == sum(len(full(one)) for one in timelines)
    assert counts.unmerged == sum(len(ids(one)) for one in calls if len(one.response_ids))
    assert (counts.timelines, counts.calls) == (len(timelines), sum(one.num_calls for one in timelines))
    assert counts.repeated >= 0
    dropped = count_tokens(calls, [])
    assert (dropped.sampled, dropped.trained, dropped.repeated, dropped.masked) == (counts.sampled, 0, 0, 0)


@given(calls_strategy, st.lists(st.booleans(), min_size=8, max_size=8))
@settings(max_examples=200)
def test_of_calls_and_retries_each_prompt_keeps_an_answer(calls: list[ModelCall], retries: list[bool]) -> None:
    calls = [replace(one, history="again") if retry else one for one, retry in zip(calls, retries, strict=False)]
    timelines = merge_calls(calls)
    wholes = [full(timeline) for timeline in timelines]
    for prompt in {tuple(one.prompt_ids.tolist()) for one in calls if len(one.response_ids)}:
        equal = [one for one in calls if tuple(one.prompt_ids.tolist()) == prompt]
        kept = [one for one in equal if any(whole[: len(ids(one))] == [*ids(one)] for whole in wholes)]
        firsts = sum(one.history != "again" for one in equal)
        # one answer alone may be without a token
        assert kept or (firsts == 1 and len(equal) > 1)
        if firsts != 1 or len(equal) == 1:
            assert len(kept) == len(equal)
    counts = count_tokens(calls, timelines)
    assert counts.sampled == counts.trained + counts.repeated or not timelines


@given(conversations())
@settings(max_examples=300)
def test_timelines_hold_whole_calls_only(calls: list[ModelCall]) -> None:
    timelines = merge_calls(calls)
    assert sum(t.num_calls for t in timelines) == len(calls)
    wholes = [list(ids(c)) for c in calls]
    for timeline in timelines:
        assert full(timeline) in wholes
        assert timeline.prompt_ids.tolist() in [c.prompt_ids.tolist() for c in calls]
        assert timeline.response_mask[-1]
    for whole in wholes:
        assert any(full(t)[: len(whole)] == whole for t in timelines)


def test_a_long_agent_run_is_linear() -> None:
    history, calls = [1] * 50, []
    for turn in range(200):
        calls.append(call(history, [turn, 2, 3]))
        history = history + [turn, 2, 3] + [9] * 20
    started = time.process_time()
    (timeline,) = merge_calls(calls)
    assert timeline.num_calls == 200
    assert time.process_time() - started < 10.0  # half a million tokens


def test_a_run_of_many_short_turns_takes_no_longer_than_its_tokens() -> None:
    history, calls = [1], []
    for turn in range(2000):
        calls.append(call(history, [turn]))
        history = [*history, turn, 9]
    started = time.process_time()
    (timeline,) = merge_calls(calls)
    assert timeline.num_calls == 2000
    assert time.process_time() - started < 2.0  # with a look at each earlier turn it took six seconds
