"""Sessions as agents name them, their sub-agents, forks, compaction and retries."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.sessions.sessions import Sessions
from tests.gateway.sessions.talk import Messages, Talks, ask, assistant, route, say, texts, user

pytestmark = pytest.mark.anyio

CLAUDE = {"x-claude-code-session-id": "c"}
CODEX = {"session-id": "c", "thread-id": "c"}
OPENCODE = {"x-session-id": "c", "x-session-affinity": "c"}
#: Of one agent and its sub-agent.
AGENTS = {
    "claude": (CLAUDE, {**CLAUDE, "x-claude-code-agent-id": "sub"}),
    "codex": (CODEX, {"session-id": "c", "thread-id": "sub", "x-codex-parent-thread-id": "c"}),
    "opencode": (OPENCODE, {"x-session-id": "sub", "x-session-affinity": "sub", "x-parent-session-id": "c"}),
}


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions() as one:
        yield one


@pytest.fixture
def to() -> Talks:
    return route()


def session_of(link: Any) -> tuple[str, str]:
    assert link.session is not None
    return link.session.session_id, link.agent


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_sub_agent_is_a_child_of_its_session(sessions: Sessions, to: Talks, agent: str) -> None:
    main, sub = AGENTS[agent]
    talk, below = [user("repair it")], [user("look for the tests")]
    say(sessions, to, talk, "I look.", headers=main)
    first = say(sessions, to, below, "There are some.", headers=sub)
    below.append(user("tool result"))
    second = say(sessions, to, below, "In tests/.", headers=sub)
    talk.append(user("tool result"))
    third = ask(sessions, to, talk, headers=main)
    assert [session_of(link) for link in (first, second, third)] == [("c", "sub"), ("c", "sub"), ("c", "")]
    assert [texts(link) for link in (first, second, third)] == [[], ["There are some."], ["I look."]]
    assert sessions.status().open == 1 and sessions.end("c", "app") == 1 and sessions.status().open == 0


async def test_a_sub_agent_of_a_sub_agent_is_of_the_session(sessions: Sessions, to: Talks) -> None:
    say(sessions, to, [user("repair it")], "I look.", headers=OPENCODE)
    say(sessions, to, [user("look")], "I look, too.", headers=AGENTS["opencode"][1])
    deeper = ask(sessions, to, [user("look closely")], headers={"x-session-id": "3", "x-parent-session-id": "sub"})
    assert session_of(deeper) == ("c", "3")


async def test_a_session_is_named_by_the_json_in_anthropics_user_id(sessions: Sessions, to: Talks) -> None:
    name = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "c"})
    say(sessions, to, [user("repair it")], "I look.", user=name)
    assert session_of(ask(sessions, to, [user("another question")], headers=CLAUDE)) == ("c", "")
    assert ask(sessions, to, [user("hi")], user='{"session_id": 1}').scope.kind == "user"
    assert ask(sessions, to, [user("hi")], user="{broken").scope.kind == "user"


async def test_our_own_name_comes_first_and_another_key_has_other_sessions(sessions: Sessions, to: Talks) -> None:
    say(sessions, to, [user("repair it")], "I look.", headers={**CLAUDE, "x-swarm-session": "mine"})
    assert ask(sessions, to, [user("and?")], headers=CLAUDE).session is None
    say(sessions, to, [user("repair it")], "I look.", headers=CLAUDE)
    assert ask(sessions, to, [user("and?")], headers=CLAUDE, key="another").session is None


async def test_a_title_is_asked_for_in_its_session_and_is_nobodys_past(sessions: Sessions, to: Talks) -> None:
    talk = [user("repair the parser of dates")]
    say(sessions, to, [user("Write a title for: repair the parser of dates")], "Parser of dates", headers=OPENCODE)
    first = say(sessions, to, talk, "I look.", headers=OPENCODE)
    assert (session_of(first), texts(first)) == (("c", ""), [])
    talk.append(user("go on"))
    assert texts(ask(sessions, to, talk, headers=OPENCODE)) == ["I look."]


async def test_what_comes_after_a_summary_is_of_the_session_without_a_past(sessions: Sessions, to: Talks) -> None:
    summary, talk = "The user wants the parser of dates repaired.", [user("repair it")]
    say(sessions, to, talk, "I look.", headers=CLAUDE)
    say(sessions, to, [*talk, user("Summarise.")], summary, headers=CLAUDE)
    after: Messages = [user(f"This session is being continued.\n\n{summary}\n"), user("and now?")]
    link = ask(sessions, to, after, headers=CLAUDE)
    assert (session_of(link), texts(link)) == (("c", ""), [])


async def test_a_summary_is_known_where_no_session_has_a_name(sessions: Sessions, to: Talks) -> None:
    summary, talk = "The user wants the parser of dates repaired.", [user("repair it")]
    say(sessions, to, talk, "I look.")
    say(sessions, to, [*talk, user("Summarise.")], summary)
    later = [user("Today is Sunday."), assistant("I see."), user(f" {summary}\n"), assistant("Yes."), user("and?")]
    assert texts(ask(sessions, to, later)) == ["I look.", summary]
    assert ask(sessions, to, later, key="another").session is None


@pytest.mark.parametrize(("opening", "known"), [("Files: " + "a.py " * 50, ["I look."]), ("Files: a.py", [])])
async def test_an_agent_that_tells_anew_where_it_works_goes_on(
    sessions: Sessions, to: Talks, opening: str, known: list[str]
) -> None:
    def talk(opening: str) -> Messages:
        return [user(opening), assistant("Got it."), user("repair it")]

    say(sessions, to, talk(opening), "I look.")
    later = [*talk(opening + " b.py"), assistant("I look."), user("and?")]
    assert texts(ask(sessions, to, later)) == known


async def test_a_fork_is_a_session_of_its_own(sessions: Sessions, to: Talks) -> None:
    talk = [user("repair it")]
    say(sessions, to, talk, "I look.", headers=CLAUDE)
    talk.append(user("another way"))
    forked = {"x-claude-code-session-id": "fork"}
    say(sessions, to, talk, "I try.", headers=forked)
    assert sessions.status().open == 2 and sessions.end("c", "app") == 1
    talk.append(user("go on"))
    assert texts(ask(sessions, to, talk, headers=forked)) == ["I try."]


async def test_a_sub_agent_without_a_name_is_known_by_what_it_was_told(sessions: Sessions, to: Talks) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "task", "arguments": '{"prompt": "Look for the tests."}'},
    }
    ask(sessions, to, [user("repair it")]).delivered("chatcmpl-1", assistant(None, tool_calls=[call]), 1.0)
    below = [user("Today is Sunday."), assistant("I see."), user("Look for the tests.")]
    first = say(sessions, to, below, "In tests/.")
    below.append(user("go on"))
    second = ask(sessions, to, below)
    assert session_of(first) == session_of(second) == ("1", "of-1")
    assert (texts(first), texts(second)) == ([], ["In tests/."])
    assert ask(sessions, to, [user("Look for the tests.")], key="another").session is None


def search(query: str) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps({"query": query})}
    return assistant(None, tool_calls=[{"id": "c1", "type": "function", "function": function}])


async def test_two_users_with_one_question_that_is_searched_for_stay_two(sessions: Sessions, to: Talks) -> None:
    question = "When is the library open?"
    ask(sessions, to, [user(question)]).delivered("chatcmpl-1", search(f" {question}"), 1.0)
    assert ask(sessions, to, [user(question)]).session is None
    assert sessions.end("1", "app") == 1


async def test_a_call_that_has_its_result_asks_no_sub_agent(sessions: Sessions, to: Talks) -> None:
    asked, call = user("May I come on Sunday?"), search("When is the library open?")
    ask(sessions, to, [asked]).delivered("chatcmpl-1", call, 1.0)
    below = [user("When is the library open?")]
    assert ask(sessions, to, below).agent == "of-1"
    say(sessions, to, [asked, call, {"role": "tool", "tool_call_id": "c1", "content": "Never."}], "No.")
    assert ask(sessions, to, below).session is None


async def test_a_retry_of_an_answer_that_broke_off_is_no_new_turn(sessions: Sessions, to: Talks) -> None:
    talk = [user("repair it")]
    say(sessions, to, talk, "I look.", headers=CLAUDE)
    talk.append(user("go on"))
    broken = say(sessions, to, [*talk], "I go on", headers=CLAUDE, completion_id="chatcmpl-broken")
    broken.abandoned()
    again = say(sessions, to, talk, "I go on.", headers=CLAUDE)
    talk.append(user("more"))
    later = ask(sessions, to, talk, headers=CLAUDE)
    assert (texts(again), texts(later)) == (["I look."], ["I look.", "I go on."])
    # it is not that the user wanted another answer
    assert sessions.counts.signals == {"abandoned": 1, "continued": 2}
