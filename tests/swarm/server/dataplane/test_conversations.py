"""A conversation that goes on from an answer of ours begins with what was sampled, in whatever form it comes back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm.server.dataplane.calls import Conversations
from swarm.server.episodes.episode import LiveEpisode
from swarm.server.journal.rows import EpisodeRow
from swarm.tokens import EARLIER_IDS, ModelCall
from tests.standins.vllm import (
    PROMPT,
    chat_chunk,
    completion_chunk,
    plain,
    plain_choice,
    role_chunk,
    several,
    sse,
    streamed,
    token_chunk,
    usage,
    usage_chunk,
)
from tests.swarm.server.conftest import Rig
from tests.swarm.server.dataplane.group import claim_group
from tests.token_data import model_call

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "8"}


def said(content: Any, *calls: tuple[str, str], **more: Any) -> dict[str, Any]:
    listed = [
        {"id": f"call-{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": listed} if listed else {}), **more}


def earlier(rig: Rig) -> list[int] | None:
    """The tokens with which the last request's prompt was to begin."""
    return rig.vllm.requests[-1][1].get(EARLIER_IDS)


async def test_the_next_turn_is_told_the_tokens_of_the_answer(rig: Rig) -> None:
    one = await rig.claim()
    rig.vllm.script += [
        plain([5, 6], prompt=[1, 2]),
        plain([7], prompt=[1, 2, 5, 6, 9]),
        plain([8], prompt=[1, 2, 55, 9, 7, 9]),
        plain([9], prompt=[4]),
        plain([3], prompt=[1]),
    ]
    talk: list[dict[str, Any]] = [USER]
    await one.chat(messages=talk)
    assert earlier(rig) is None
    talk += [said("t5 t6", reasoning="hm"), USER]
    await one.chat(messages=talk)
    assert earlier(rig) == [1, 2, 5, 6]
    # as parts, and with space around: what clients make of a text
    talk += [said([{"type": "text", "text": " t7\n"}]), USER]
    await one.chat(messages=talk)
    assert earlier(rig) == [1, 2, 5, 6, 9, 7]
    await one.chat(messages=[*talk[:-2], said("another"), USER])
    assert earlier(rig) == [1, 2, 5, 6], "what came before it is still ours"
    await one.chat(messages=[{"role": "user", "content": "else"}])
    assert [call.history for call in one.calls] == ["new", "kept", "lost", "edited", "new"]
    ended = await one.end()
    assert ended["tokens"] == {
        one.uuid: {
            "calls": 5,
            "timelines": 4,
            "sampled": 6,
            "trained": 6,
            "repeated": 0,
            "dropped": 0,
            "why": "",
            "masked": 1,
            "prompts": 2 + 6 + 1 + 1,
            "unmerged": 2 + 5 + 6 + 1 + 1 + 6,
            "kept": 1,
            "lost": 1,
            "edited": 1,
        }
    }
    assert (await one.end())["tokens"] == ended["tokens"], "a repetition is answered alike"


async def test_what_is_deleted_is_not_remembered_either(rig: Rig) -> None:
    async def ended(session: str, *, deleted_first: bool = False) -> None:
        one = await rig.claim()
        await one.chat(messages=[{"role": "user", "content": session}])
        delete = rig.client.post("/data/delete", params={"session": session})
        if deleted_first:
            assert (await delete).status_code == 200
        output = {"reward": 1.0, "notes": {"session": session}}
        about = {"client_uuid": one.client, "episode_uuid": one.uuid, "task_id": session}
        await rig.post("/end_episode", **about, workflow_output=output)
        if not deleted_first:
            assert (await delete).json()["deleted"]

    async def next_turn(session: str) -> list[int] | None:
        talk = [{"role": "user", "content": session}, said("t1 t2"), USER]
        await (await rig.claim()).chat(messages=talk)
        return earlier(rig)

    other = await rig.claim()
    await other.chat(messages=[{"role": "user", "content": "others"}])
    await ended("hers")
    assert await next_turn("hers") is None
    await ended("ran on", deleted_first=True)
    assert await next_turn("ran on") is None
    assert await next_turn("others") == [*PROMPT, 1, 2]


async def test_a_streamed_tool_call_comes_back_written_anew(rig: Rig) -> None:
    one = await rig.claim()

    def part(**function: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": 0, "function": function}]}

    rig.vllm.script += [
        streamed(
            role_chunk([1]),
            token_chunk([2], delta={"content": "I add."}),
            token_chunk([3], delta=part(name="add", arguments="")),
            token_chunk([4], delta=part(arguments='{"n": ')),
            token_chunk([5], "tool_calls", delta=part(arguments="7}")),
            usage_chunk(4, 1),
        ),
        plain([9], prompt=[1, 2, 3, 4, 5, 8]),
    ]
    streaming = await one.chat(messages=[USER], stream=True)
    assert streaming.text.rstrip().endswith("[DONE]")
    await one.chat(messages=[USER, said("I add.", ("add", '{"n":7}')), RESULT])
    assert earlier(rig) == [1, 2, 3, 4, 5]
    assert [call.history for call in one.calls] == ["new", "kept"]


async def test_a_stream_that_was_cut_is_remembered_whole(rig: Rig) -> None:
    one = await rig.claim()
    rest = completion_chunk([6], "stop", [1, 5])
    rig.vllm.script += [
        streamed(role_chunk([1]), token_chunk([5]), chat_chunk({"delta": {}, "finish_reason": "abort"})),
        lambda body: sse([rest, completion_chunk([]) | {"choices": [], "usage": usage(2, 1)}]),
        plain([7], prompt=[1, 5, 6]),
    ]
    await one.chat(messages=[USER], stream=True)
    await one.chat(messages=[USER, said("t5 t6 "), USER])
    assert earlier(rig) == [1, 5, 6]


async def test_the_answer_of_another_episode_is_known_too(rig: Rig) -> None:
    first, second = await rig.claim(), await rig.claim()
    rig.vllm.script += [plain([5], prompt=[1]), plain([6], prompt=[1, 5, 2])]
    await first.chat(messages=[USER])
    await second.chat(messages=[USER, said("t5"), USER], swarm_earlier_ids=[3])
    assert earlier(rig) == [1, 5]
    assert [call.history for call in second.calls] == ["kept"]


async def test_a_group_goes_on_from_the_answer_that_was_chosen_of_the_group_before(rig: Rig) -> None:
    group, following = await claim_group(rig), await claim_group(rig)
    both = [plain_choice([5]), plain_choice([6, 7], index=1)]
    rig.vllm.script += [several(*both, prompt=[1]), several(*both, prompt=[1, 6, 7, 2])]
    await group.chat(messages=[USER])
    await following.chat(messages=[USER, said("t6 t7"), USER])
    assert earlier(rig) == [1, 6, 7]
    assert [call.history for member in following.members for call in member.calls] == ["kept", "kept"]


async def test_what_is_not_trained_is_told_with_its_reason(rig: Rig) -> None:
    one, other = await rig.claim(), await rig.claim()
    rig.vllm.script += [plain([5, 6], prompt=[1]), plain([5, 6], prompt=[1], usage={}), plain([7, 8], prompt=[1])]
    await one.chat()
    await one.chat()
    ended = await one.end()
    [told] = ended["tokens"].values()
    assert (told["sampled"], told["trained"], told["dropped"], told["timelines"]) == (2, 0, 2, 0)
    assert ended["error"] == f"not trained: {told['why']}" and "quarantined" in told["why"]
    await other.chat()
    await rig.post("/abort_episode", client_uuid="me", episode_uuid=other.uuid)
    assert rig.controller.pool.tokens([other.uuid])[other.uuid].sampled == 2


# ---------------------------------------------------------------------- without a server


def episode(name: str) -> LiveEpisode:
    row = EpisodeRow(name, "me", "train", b"", 1.0, 1.0, 0.0)
    return LiveEpisode(row, 0.0, 0.0, [])


def answer(ids: list[int]) -> ModelCall:
    return model_call([1], ids)


def test_the_own_answer_goes_before_a_sibling_with_the_same_text() -> None:
    known = Conversations()
    group = [episode("a"), episode("b")]
    begun = known.begin("m", {"messages": [USER]}, group)
    begun.remember({0: answer([2]), 1: answer([3, 4])}, {0: said("x"), 1: said("x")})
    talk = {"messages": [USER, said("x"), USER]}
    assert [known.begin("m", talk, [one]).earlier_ids for one in group] == [[1, 2], [1, 3, 4]]
    assert known.begin("m", talk, [episode("c")]).earlier_ids == [1, 3, 4]
    for other in ({"tools": [RESULT]}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert not known.begin("m", talk | other, group).earlier_ids, "the prompt is written otherwise"
    assert not known.begin("another model", talk, group).earlier_ids
    assert known.begin("m", {"messages": [USER, said("y"), USER]}, group).edited
    assert not known.begin("m", {"messages": [USER, said("y"), USER]}, [episode("c")]).edited


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_an_answer_that_was_begun_comes_back_with_its_beginning(echo: bool, ours: bool) -> None:
    """A caller began it, or had it cut by a length, and has it continued."""
    known, one = Conversations(), [episode("a")]
    if ours:
        known.begin("m", {"messages": [USER]}, one).remember({0: answer([2])}, {0: said("be")})
    begun = {"messages": [USER, said("be")], "continue_final_message": True, "echo": echo}
    rest = known.begin("m", begun, one)
    assert rest.earlier_ids == ([1, 2] if ours else []) and not rest.edited
    rest.remember({0: model_call([1, 2], [3])}, {0: said("begun" if echo else "gun")})
    after = known.begin("m", {"messages": [USER, said("begun"), USER]}, one)
    assert after.earlier_ids == [1, 2, 3] and not after.edited
    # begun once more, the answer is another sample, and no message that the caller changed
    assert not known.begin("m", begun, one).edited
    # without the field, the template ends that message
    known.begin("m", {"messages": [USER, said("be")]}, one).remember({0: answer([4])}, {0: said("gun")})
    assert known.begin("m", {"messages": [USER, said("be"), said("gun"), USER]}, one).earlier_ids == [1, 4]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (said("x", reasoning="one"), said("x", reasoning="two")),
        (said(None, ("f", "{}"), reasoning="one"), said(None, ("f", "{}"), reasoning="two")),
        (said("x\n"), said("x")),
    ],
)
def test_of_answers_that_mean_the_same_the_one_that_came_back_is_gone_on_from(first: Any, second: Any) -> None:
    """The others spell another text where the template keeps reasoning and white space."""
    known, group, following = Conversations(), [episode("a"), episode("b")], [episode("c"), episode("d")]
    known.begin("m", {"messages": [USER]}, group).remember({0: answer([2]), 1: answer([3, 4])}, {0: first, 1: second})

    def goes_on(said: dict[str, Any]) -> list[int]:
        return known.begin("m", {"messages": [USER, said, RESULT]}, following).earlier_ids

    assert [goes_on(first), goes_on(second)] == [[1, 2], [1, 3, 4]]
    thought = first.get("reasoning")
    assert goes_on({**first, "reasoning": None, "reasoning_content": thought}) == [1, 2], "its former name"
    parts = [{"type": "text", "text": first["content"]}] if first["content"] else []
    assert goes_on({**first, "content": parts}) == [1, 2]
    assert goes_on({**first, "reasoning": "of nobody"}) == [1, 3, 4], "the latest"
    # the group itself goes on from one of its answers, and each episode from its own where neither came back
    following = group
    assert [goes_on(first), goes_on(second)] == [[1, 2], [1, 3, 4]]
    following = group[:1]
    assert goes_on({**first, "reasoning": "of nobody"}) == [1, 2]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 6)), max_size=40))
@example([(4, 0, 1), (4, 1, 4), (4, 2, 6), (4, 3, 6)])
def test_what_is_remembered_is_bounded_and_the_latest(steps: list[tuple[int, int, int]]) -> None:
    known = Conversations(most_tokens=20)
    for question, name, length in steps:
        one = episode(str(name))
        asked = {"messages": [{"role": "user", "content": str(question)}]}
        known.begin("m", asked, [one]).remember({0: answer([question] * length)}, {0: said("x")})
        back = {"messages": [*asked["messages"], said("x"), USER]}
        assert known.begin("m", back, [one]).earlier_ids == [1] + [question] * length
    held = [
        known.begin("m", {"messages": [{"role": "user", "content": str(q)}, said("x")]}, [episode(str(n))]).earlier
        for q in range(6)
        for n in range(4)
    ]
    distinct = {id(pair[1]): sum(map(len, pair)) for pair in held if pair is not None}
    assert sum(distinct.values()) <= 20


arguments = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=5,
)


@given(
    st.lists(
        st.one_of(
            arguments,
            st.fixed_dictionaries(
                {"role": st.just("assistant")},
                optional={
                    "content": arguments,
                    "tool_calls": arguments | st.lists(st.fixed_dictionaries({"function": arguments})),
                },
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_messages_of_any_form_are_left_to_vllm(messages: list[Any]) -> None:
    assert not Conversations().begin("m", {"messages": messages}, [episode("a")]).earlier_ids


@given(st.text(max_size=8), st.lists(st.tuples(st.text(max_size=3), arguments), max_size=2), st.booleans())
def test_answers_are_known_however_clients_write_them(text: str, calls: list[tuple[str, Any]], as_parts: bool) -> None:
    known = Conversations()
    one = episode("a")
    given_out = said(text, *((name, json.dumps(value, indent=1)) for name, value in calls), refusal=None)
    known.begin("m", {"messages": [USER]}, [one]).remember({0: answer([2])}, {0: given_out})
    content: Any = [{"type": "text", "text": text}] if as_parts else text or None
    back = said(content, *((name, json.dumps(value, separators=(",", ":"))) for name, value in calls))
    found = known.begin("m", {"messages": [USER, back, USER]}, [one])
    assert found.earlier_ids == [1, 2]
    assert found.history(np.array([1, 2, 3], np.int32)) == "kept"
    assert found.history(np.array([1], np.int32)) == "lost"
