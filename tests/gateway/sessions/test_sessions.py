"""Sessions: who goes on from what, what hooks are shown, and when a conversation is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anyio.lowlevel
import pytest

from gateway.observability.request import Metrics, RequestRecord, recording
from gateway.sessions.sessions import Sessions
from reward_hooks import HookContext, Session
from swarm.errors import HookError, RequestError
from swarm.subjects import Subject
from tests.gateway.sessions.talk import (
    Ended,
    Messages,
    ask,
    assistant,
    closed,
    incoming,
    route,
    say,
    texts,
    token_ids,
    user,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions() as one:
        yield one


# ------------------------------------------------------------------ linking


async def test_a_request_with_an_answer_in_it_goes_on_from_that(sessions: Sessions) -> None:
    to, talk = route(), [user("hi")]
    first = say(sessions, to, talk, "Hello.", reward=0.25)
    assert first.session is None
    talk.append(user("and now?"))
    second = say(sessions, to, talk, "Now this.")
    talk.append(user("thanks"))
    third = ask(sessions, to, talk)
    assert texts(second) == ["Hello."] and texts(third) == ["Hello.", "Now this."]
    assert third.session is not None
    [turn, _] = third.session.turns
    assert (turn.reward, turn.request["messages"]) == (0.25, [user("hi")])
    assert sessions.status().linked == {"answer": 2} and sessions.status().open == 1


async def test_a_changed_system_prompt_breaks_no_conversation(sessions: Sessions) -> None:
    to = route()
    say(sessions, to, [{"role": "system", "content": "It is 12:00."}, user("hi")], "Hello.")
    later = [{"role": "system", "content": "It is 12:01."}, user("hi"), assistant("Hello."), user("and?")]
    assert texts(ask(sessions, to, later)) == ["Hello."]


async def test_a_history_whose_beginning_was_cut_off_goes_on(sessions: Sessions) -> None:
    to, purr = route(), "All of them purr, and some of the big ones too."
    asked, answer = user("which cats purr?"), assistant(f"<think>Cats?</think>{purr}\n")
    noon, brief = {"role": "system", "content": "It is noon."}, {"role": "system", "content": "Be brief."}
    first = say(sessions, to, [noon, user("hi"), assistant("Hello."), asked, brief], purr)
    cut = [asked, answer, user("and lions?"), brief]
    assert ask(sessions, to, cut, key="another").session is None
    assert texts(say(sessions, to, [*cut], "Lions roar.")) == [purr]
    assert first.turn is not None and first.turn.feedback()[0].signals == {"continued": 1.0}
    again = say(sessions, to, cut, "They roar.")
    assert (texts(again), sessions.counts.signals["regenerated"]) == ([purr], 1)
    # the model repeated an example, which other requests have, too
    assert ask(sessions, to, [asked, answer, user("and dogs?")]).session is None


async def test_a_history_without_the_calls_between_question_and_answer_goes_on(sessions: Sessions) -> None:
    to, asked, found = route(), user("which cats purr?"), "All of them purr, and some of the big ones too."
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    look, before = assistant(None, tool_calls=[call]), [user("hi"), assistant("Hello.")]
    say(sessions, to, [user("hi")], "Hello.")
    ask(sessions, to, [*before, asked]).delivered("chatcmpl-look", look, 1.0)
    say(sessions, to, [*before, asked, look, {"role": "tool", "tool_call_id": "c1", "content": "cats"}], found)
    assert texts(ask(sessions, to, [*before, asked, assistant(found), user("and lions?")])) == ["Hello.", None, found]


@pytest.mark.parametrize("added", ["Cats are small animals. {}", "{}\nAnswer in one line."])
async def test_a_history_without_what_was_added_to_its_questions_goes_on(sessions: Sessions, added: str) -> None:
    to, asked, purr = route(), "which cats purr?", "All of them purr, and some of the big ones too."
    say(sessions, to, [user(added.format(asked))], purr)
    later = [user(asked), assistant(purr), user(added.format("and lions?"))]
    assert texts(say(sessions, to, later, "Lions roar, and purr as they breathe out.")) == [purr]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("which dogs?", "All of them purr, and some of the big ones too."),
        ("cats", "All of them purr, and some of the big ones too."),
        ("thanks", "Welcome!"),
    ],
)
async def test_a_cut_history_goes_on_from_no_other_answer(sessions: Sessions, question: str, answer: str) -> None:
    to = route()
    asked = user("thanks" if question == "thanks" else "which cats?")
    say(sessions, to, [user("hi"), assistant("Hello."), asked], answer)
    assert ask(sessions, to, [user(question), assistant(answer), user("and?")]).session is None


async def test_a_cut_history_goes_on_from_nobody_else_who_was_answered_the_same(sessions: Sessions) -> None:
    """Models answer thanks alike, and a gateway that was started again knows one of two users."""
    to, thanks, welcome = route(), user("thanks"), "You are welcome! Let me know if there is anything else."
    mine, theirs = ([user(f"about {what}?"), assistant(f"{what} it is.")] for what in ("cats", "my illness"))
    other = say(sessions, to, [*theirs, thanks], welcome)
    assert ask(sessions, to, [*mine, thanks, assistant(welcome), user("and?")]).session is None
    say(sessions, to, [user("hi"), assistant("Hello."), *mine, thanks], welcome)
    # it may be that of either
    assert ask(sessions, to, [thanks, assistant(welcome), user("and?")]).session is None
    assert other.turn is not None and not other.turn.feedback()
    cut = [*mine, thanks, assistant(welcome), user("and?")]
    session = ask(sessions, to, cut).session
    assert session is not None and session.turns[-1].request["messages"][0] == user("hi")


async def test_calls_and_their_results_are_turns_of_one_session(sessions: Sessions) -> None:
    to, asked = route(), user("what is 1+1?")
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    answer = assistant(None, tool_calls=[call])
    ask(sessions, to, [asked]).delivered("chatcmpl-calls", answer, 1.0)
    result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    link = ask(sessions, to, [asked, answer, result])
    assert link.session is not None and link.session.turns[0].message == answer
    # a loop of calls is not the user going on
    assert link.session.turns[0].feedback is None


@pytest.mark.parametrize(
    "elsewhere", [{"key": "another app"}, {"to": "another route"}, {"user": "another user"}], ids=str
)
async def test_nobody_goes_on_from_what_another_was_answered(sessions: Sessions, elsewhere: dict[str, Any]) -> None:
    talk = [user("hi")]
    say(sessions, route(), talk, "Hello.")
    talk.append(user("and?"))
    request = {name: value for name, value in elsewhere.items() if name != "to"}
    assert ask(sessions, route(name=elsewhere.get("to", "route")), talk, **request).session is None


async def test_a_session_that_is_named_is_entered_by_its_name_only(sessions: Sessions) -> None:
    to, talk = route(), [user("hi")]
    say(sessions, to, talk, "Hello.", headers={"x-swarm-session": "mine"})
    talk.append(user("and?"))
    assert ask(sessions, to, talk).session is None
    assert texts(ask(sessions, to, talk, headers={"x-swarm-session": "mine"})) == ["Hello."]
    assert ask(sessions, to, talk, headers={"x-swarm-session": "mine"}, key="another").session is None


async def test_a_named_session_goes_on_without_its_history(sessions: Sessions) -> None:
    to = route()
    say(sessions, to, [user("hi")], "Hello.", metadata={"session_id": "s"})
    second = say(sessions, to, [user("and?")], "Well.", metadata={"session_id": "s"})
    third = ask(sessions, to, [user("so?")], metadata={"session_id": "s"})
    assert (texts(second), texts(third)) == (["Hello."], ["Hello.", "Well."])
    assert third.session is not None and third.session.session_id == "s"
    # what is not known is not said: it may be a new question
    assert third.session.turns[0].feedback is None


async def test_conversations_that_say_the_same_stay_two(sessions: Sessions) -> None:
    to = route()
    one, other = [user("hi")], [user("hi")]
    say(sessions, to, one, "Hello.", reward=0.1)
    say(sessions, to, other, "Hello.", reward=0.2)
    one.append(user("about cats"))
    other.append(user("about dogs"))
    say(sessions, to, one, "Cats purr.")
    say(sessions, to, other, "Dogs bark.")
    one.append(user("more"))
    other.append(user("more"))
    assert texts(ask(sessions, to, one)) == ["Hello.", "Cats purr."]
    assert texts(ask(sessions, to, other)) == ["Hello.", "Dogs bark."]
    assert len({link.session_id for link in (ask(sessions, to, one).session, ask(sessions, to, other).session)}) == 2  # type: ignore[union-attr]


async def test_a_name_that_is_too_long_is_refused(sessions: Sessions) -> None:
    with pytest.raises(RequestError) as caught:
        ask(sessions, route(), [user("hi")], headers={"x-swarm-session": "x" * 257})
    assert caught.value.param == "x-swarm-session"


async def test_an_unanswered_request_leaves_nothing(sessions: Sessions) -> None:
    ask(sessions, route(), [user("hi")])
    assert sessions.status().open == 0


# ------------------------------------------------------------------ signals


def shown(link: Any, turn: int = -1) -> dict[str, float]:
    feedback = link.session.turns[turn].feedback
    return feedback.signals if feedback is not None else {}


def observed_of(sessions: Sessions, completion_id: str) -> dict[str, float]:
    turn = sessions.turn(completion_id, "app")
    assert turn is not None
    return turn.observed


async def test_the_user_goes_on(sessions: Sessions) -> None:
    to, talk = route(), [user("hi")]
    say(sessions, to, talk, "Hello.")
    talk.append(user("tell me about cats"))
    assert shown(ask(sessions, to, talk)) == {"continued": 1.0}


@pytest.mark.parametrize(
    ("then", "observed"),
    [
        ("tell me about big cats", {"regenerated": 1.0}),
        ("tell me about small cats", {"edited": pytest.approx(0.8)}),
        # an application asks for a title beside
        ("Write a title of five words for this conversation.", {}),
    ],
)
async def test_another_question_in_place_of_the_last(sessions: Sessions, then: str, observed: dict[str, float]) -> None:
    to, talk = route(), [user("hi")]
    say(sessions, to, talk, "Hello.")
    first = say(sessions, to, [*talk, user("tell me about big cats")], "Tigers.", completion_id="chatcmpl-first")
    again = say(sessions, to, [*talk, user(then)], "Lions.")
    # the answer that was asked for anew is none of the turns before its successor
    assert texts(first) == texts(again) == ["Hello."]
    assert observed_of(sessions, "chatcmpl-first") == observed


async def test_the_user_goes_back_and_leaves_later_answers(sessions: Sessions) -> None:
    to, start = route(), [user("hi")]
    say(sessions, to, start, "Hello.")
    path = [*start, user("about cats")]
    say(sessions, to, path, "Cats purr.")
    say(sessions, to, [*path, user("more")], "They sleep.", completion_id="chatcmpl-left")
    ask(sessions, to, [*start, user("about cats")])
    assert observed_of(sessions, "chatcmpl-left") == {"abandoned": 1.0}


@pytest.mark.parametrize(("named", "observed"), [({}, {}), ({"user": "u1"}, {"regenerated": 1.0})], ids=str)
async def test_a_first_question_asked_twice_says_nothing_unless_it_is_one_user(
    sessions: Sessions, named: dict[str, str], observed: dict[str, float]
) -> None:
    say(sessions, route(), [user("hi")], "Hello.", completion_id="chatcmpl-first", **named)
    ask(sessions, route(), [user("hi")], **named)
    assert observed_of(sessions, "chatcmpl-first") == observed


async def test_another_answer_to_the_same_question_is_another_conversation(sessions: Sessions) -> None:
    to = route()
    say(sessions, to, [user("hi")], "Hello.")
    assert ask(sessions, to, [user("hi"), assistant("Good day to you!"), user("and?")]).session is None


async def test_the_user_repeats_the_question(sessions: Sessions) -> None:
    to, talk = route(), [user("what is the capital of France?")]
    say(sessions, to, talk, "A big city.")
    talk.append(user("What is the capital of France"))
    link = ask(sessions, to, talk)
    assert shown(link)["repeated"] > 0.9
    talk[-1] = user("yes")
    say(sessions, to, talk, "Paris.")
    talk.append(user("yes"))
    assert "repeated" not in shown(ask(sessions, to, talk))


async def test_instructions_behind_a_question_hide_no_signal(sessions: Sessions) -> None:
    to, brief = route(), {"role": "system", "content": "Be brief."}
    asked = user("what is the capital of France?")
    say(sessions, to, [asked, brief], "A big city.")
    assert shown(ask(sessions, to, [asked, assistant("A big city."), asked, brief])) == {
        "continued": 1.0,
        "repeated": 1.0,
    }


async def test_what_an_application_writes_before_each_question_is_no_repetition(sessions: Sessions) -> None:
    to, document = route(), "Answer by this document: " + " ".join(f"line {number}" for number in range(200))
    talk = [user(f"{document}\nHow many cats are there?")]
    say(sessions, to, talk, "Four.")
    talk.append(user(f"{document}\nAnd who feeds the dogs?"))
    assert shown(ask(sessions, to, talk)) == {"continued": 1.0}


async def test_a_user_who_hangs_up_has_abandoned_the_answer(sessions: Sessions) -> None:
    to, talk = route(), [user("hi")]
    link = say(sessions, to, talk, "Hello.")
    link.abandoned()
    assert shown(ask(sessions, to, [*talk, user("back again")]))["abandoned"] == 1.0


# ------------------------------------------------------------------ ends


async def credits(link: Any) -> float:
    return (await closed(link)).credit


async def test_an_idle_session_is_over_and_its_reward_reaches_the_open_groups(sessions: Sessions) -> None:
    hook = Ended()
    to, talk = route(hook, session_idle_seconds=0.05), [user("hi")]
    links = [say(sessions, to, talk, "Hello.", reward=0.25)]
    talk.append(user("and?"))
    links.append(say(sessions, to, talk, "Well.", reward=None))
    async with asyncio.timeout(10):
        assert await asyncio.gather(*(credits(link) for link in links)) == [1.0, 2.0]
    [session] = hook.sessions
    assert [turn.reward for turn in session.turns] == [0.25, None]
    assert (sessions.counts.ended, sessions.counts.credited) == ({"idle": 1}, 2)


class Clock:
    """The event loop's time, which passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._ahead, began = 0.0, loop.time()
        monkeypatch.setattr(loop, "time", lambda: began + self._ahead)

    async def passes(self, seconds: float) -> None:
        end = self._ahead + seconds
        while self._ahead < end:
            self._ahead = min(end, self._ahead + 5.0)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()


async def test_by_default_every_answer_of_a_conversation_that_falls_silent_gets_its_credit(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, to, talk = Clock(monkeypatch), route(Ended()), [user("hi")]
    closing: list[asyncio.Task[float]] = []
    for _ in range(4):
        link = ask(sessions, to, talk)
        # an answer that takes long is no silence
        await clock.passes(200)
        answer = assistant(f"answer {len(talk)}")
        link.delivered(f"chatcmpl-{len(talk)}", answer, 0.5)
        closing.append(asyncio.create_task(credits(link)))
        talk += [answer, user("go on")]
    await clock.passes(310)
    # the hook runs in a thread
    ends = time.monotonic() + 10
    while not all(task.done() for task in closing) and time.monotonic() < ends:
        await anyio.lowlevel.checkpoint()
    assert [task.done() and task.result() for task in closing] == [1.0, 2.0, 3.0, 4.0]
    assert (sessions.counts.credited, sessions.counts.credit_dropped) == (4, 0)


async def test_a_session_is_not_silent_while_its_answers_are_not_trained(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a ``train_fraction``, or while an upstream answers in the place of an engine that trains."""
    clock, to, talk, named = Clock(monkeypatch), route(Ended()), [user("hi")], {"x-swarm-session": "s"}
    say(sessions, to, talk, "Hello.", headers=named)
    for _ in range(3):
        await clock.passes(200)
        sessions.count_untrained(incoming([*talk, user("and?")], headers=named), to.name, "not_chosen")
    assert sessions.counts.ended == {}
    await clock.passes(310)
    assert sessions.counts.ended == {"idle": 1}


async def test_a_request_under_way_keeps_its_session(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, to, talk = Clock(monkeypatch), route(), [user("hi")]
    say(sessions, to, talk, "Hello.")
    link = ask(sessions, to, [*talk, user("and?")])
    await clock.passes(to.settings.claim_wait_seconds + to.settings.sample_timeout_seconds)
    link.delivered("chatcmpl-late", assistant("Well."), 0.5)
    assert (sessions.status().open, sessions.status().ended) == (1, {})


async def test_an_untrained_answer_meanwhile_does_not_end_the_session_of_a_request_under_way(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, to, talk, named = Clock(monkeypatch), route(Ended()), [user("hi")], {"x-swarm-session": "s"}
    say(sessions, to, talk, "Hello.", headers=named)
    await clock.passes(200)
    ask(sessions, to, [*talk, assistant("Hello."), user("think")], headers=named)
    await clock.passes(1)
    sessions.count_untrained(incoming([user("a title")], headers=named), to.name, "pass_through:title")
    await clock.passes(400)
    assert sessions.counts.ended == {}


async def test_an_answer_meanwhile_does_not_end_the_session_of_a_request_under_way(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an agent that asks for its next turn while a sub-agent of it waits."""
    clock, to, talk, named = Clock(monkeypatch), route(Ended()), [user("hi")], {"x-swarm-session": "s"}
    say(sessions, to, talk, "Hello.", headers=named)
    slow, quick = (ask(sessions, to, [*talk, user(text)], headers=named) for text in ("think", "a title"))
    await clock.passes(1)
    quick.delivered("chatcmpl-quick", assistant("Title."), 0.5)
    await clock.passes(400)
    assert sessions.counts.ended == {}
    slow.delivered("chatcmpl-slow", assistant("Well."), 0.5)
    await clock.passes(310)
    assert sessions.counts.ended == {"idle": 1}


@pytest.mark.parametrize(("settings", "seconds"), [({}, 1700), ({"feedback_window_seconds": 3600}, 3500)])
async def test_a_user_who_reads_for_long_goes_on_with_the_conversation(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], seconds: float
) -> None:
    clock, to, talk = Clock(monkeypatch), route(**settings), [user("hi")]
    say(sessions, to, talk, "Hello.")
    await clock.passes(seconds)
    assert texts(ask(sessions, to, [*talk, user("and?")])) == ["Hello."]
    assert sessions.counts.ended == {}
    await clock.passes(to.settings.sample_timeout_seconds + 3700)
    assert sessions.counts.ended == {"idle": 1}


async def test_feedback_finds_an_answer_whose_session_is_over_while_its_group_is_open(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, to = Clock(monkeypatch), route(Ended(), feedback_window_seconds=3600)
    ask(sessions, to, [user("hi")]).delivered("chatcmpl-one", assistant("Hello."), 0.5)
    await clock.passes(3500)
    turn = sessions.turn("chatcmpl-one", "app")
    assert sessions.counts.ended == {"idle": 1}
    assert turn is not None and turn.open


async def test_shutdown_ends_every_session() -> None:
    hook = Ended()
    to = route(hook)
    async with Sessions() as sessions:
        links = [say(sessions, to, [user(f"number {number}")], "Hello.") for number in range(20)]
    assert len(hook.sessions) == 20
    assert await asyncio.gather(*(credits(link) for link in links)) == [1.0] * 20


async def test_a_reward_that_comes_after_its_group_is_dropped_and_counted(sessions: Sessions) -> None:
    hook = Ended()
    to = route(hook, session_window_seconds=0.0)
    link = say(sessions, to, [user("hi")], "Hello.", headers={"x-swarm-session": "s"})
    assert await credits(link) == 0.0
    async with asyncio.timeout(10):
        sessions.end("s", "app")
        while not sessions.counts.credit_dropped:
            await anyio.lowlevel.checkpoint()
    assert sessions.counts.credited == 0


async def test_without_a_session_hook_nothing_waits(sessions: Sessions) -> None:
    link = say(sessions, route(), [user("hi")], "Hello.")
    async with asyncio.timeout(10):
        assert await credits(link) == 0.0


async def test_a_hook_that_fails_gives_nothing_and_keeps_no_group(sessions: Sessions) -> None:
    def fails(session: Session, context: HookContext) -> list[float]:
        raise HookError("cannot tell", code="cannot_tell")

    link = say(sessions, route(fails), [user("hi")], "Hello.", headers={"x-swarm-session": "s"})
    sessions.end("s", "app")
    async with asyncio.timeout(10):
        assert await credits(link) == 0.0
    assert sessions.counts.hook_failures == {"cannot_tell": 1}


async def test_a_turn_added_after_the_end_begins_another_session(sessions: Sessions) -> None:
    hook = Ended()
    to, talk = route(hook), [user("hi")]
    say(sessions, to, talk, "Hello.", headers={"x-swarm-session": "s"})
    talk.append(user("and?"))
    late = ask(sessions, to, talk, headers={"x-swarm-session": "s"})
    sessions.end("s", "app")
    late.delivered("chatcmpl-late", assistant("Well."), 1.0)
    assert sessions.end("s", "app") == 1
    async with asyncio.timeout(10):
        assert await credits(late) == 1.0
        # the hook of the first session runs beside that of the second
        while len(hook.sessions) < 2:
            await anyio.lowlevel.checkpoint()
    assert [len(session.turns) for session in hook.sessions] == [1, 1]


async def test_a_prompt_of_token_ids_continues_nothing(sessions: Sessions) -> None:
    to, named = route(), {"x-swarm-session": "s"}
    for prompt in ([1, 2], [3, 4]):
        request = replace(token_ids(prompt), headers=named)
        link = sessions.link(request, to.name, to.settings, to.hooks)
        link.delivered(f"cmpl-{prompt[0]}", assistant("Hello."), 0.5)
        assert link.session is None
    assert sessions.counts.signals == {} and sessions.end("s", "app") == 1


# ------------------------------------------------------------------ bounds


async def test_the_longest_silent_conversations_leave_first_and_end_properly() -> None:
    hook = Ended()
    to = route(hook)
    async with Sessions(max_sessions=2) as sessions:
        first, second = [user("one")], [user("two")]
        say(sessions, to, first, "1")
        say(sessions, to, second, "2")
        ask(sessions, to, [*first, user("go on")])
        say(sessions, to, [user("three")], "3")
        assert (sessions.status().open, sessions.counts.ended) == (2, {"evicted": 1})
        assert ask(sessions, to, [*second, user("go on")]).session is None
        assert texts(ask(sessions, to, [*first, user("go on")])) == ["1"]
    assert sessions.counts.ended == {"evicted": 1, "shutdown": 2}
    assert sessions.status().bytes == 0


@pytest.mark.parametrize("headers", [{}, {"x-swarm-session": "{}"}], ids=["anonymous", "named"])
async def test_the_oldest_reports_are_forgotten(headers: dict[str, str]) -> None:
    async with Sessions(max_sessions=2) as sessions:
        for number in range(4):
            told = {name: value.format(number) for name, value in headers.items()}
            say(sessions, route(), [user(f"number {number}")], "Yes.", completion_id=f"chatcmpl-{number}", headers=told)
        assert [len(sessions.reports(str(number), "app")) for number in range(4)] == [0, 0, 1, 1]


async def test_a_client_that_invents_agents_fills_no_report(sessions: Sessions) -> None:
    for number in range(100):
        headers = {"x-swarm-session": "s", "session-id": "s", "thread-id": f"{number} {'x' * 1000}"}
        say(sessions, route(), [user("hi")], "Yes.", headers=headers)
    [report] = sessions.reports("s", "app")
    assert len(report.agents) == 65 and report.agents["(others)"].requests == 36
    assert max(map(len, report.agents)) <= 256


async def test_a_conversation_is_kept_in_the_size_of_its_last_request(sessions: Sessions) -> None:
    to = route()
    tools = [{"type": "function", "function": {"name": "t", "description": "x" * 10_000}}]
    talk: Messages = []
    for number in range(15):
        talk.append(user(f"{number} " + "word " * 100))
        say(sessions, to, talk, "answer " * 50, tools=tools)
    last = len(incoming(talk, tools=tools).raw)
    assert last <= sessions.status().bytes + 5_000 and sessions.status().bytes < 1.5 * last


async def test_bytes_are_bounded() -> None:
    async with Sessions(max_bytes=50_000) as sessions:
        for number in range(20):
            say(sessions, route(), [user(f"{number} " + "x" * 10_000)], "ok")
        assert sessions.status().bytes <= 50_000 and sessions.status().open == 4


async def test_a_session_that_never_ends_is_ended_once_it_alone_is_too_large() -> None:
    hook = Ended()
    to, headers = route(hook), {"x-swarm-session": "always"}
    async with Sessions(max_bytes=50_000) as sessions:
        for number in range(20):
            say(sessions, to, [user(f"{number} " + "x" * 10_000)], "ok", headers=headers)
            assert sessions.status().bytes <= 50_000
        assert sessions.counts.ended == {"evicted": 4}
    assert [len(session.turns) for session in hook.sessions] == [5, 5, 5, 5]


@pytest.mark.parametrize("subject", [Subject(session="chat"), Subject(key="app")])
async def test_a_request_under_way_does_not_bring_back_what_is_deleted(subject: Subject) -> None:
    async with Sessions() as sessions:
        to, messages = route(), [user("secret")]
        named = {"headers": {"x-swarm-session": "chat"}}
        say(sessions, to, messages, "yes", **named)
        messages.append(user("more"))
        record = RequestRecord("r", Metrics(), key="app")
        with recording(record):
            under_way = ask(sessions, to, messages, **named)
            assert sessions.erase(subject) == 1
            record.deletions.append(subject.fits)
            under_way.delivered("chatcmpl-late", assistant("late"), 0.5)
        left = sessions.status()
        assert left.open == 0 and left.bytes == 0 and under_way.turn is None
        say(sessions, to, [user("new")], "kept", **named)
        assert sessions.status().open == 1
