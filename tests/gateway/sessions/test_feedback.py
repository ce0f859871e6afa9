"""``POST /v1/feedback`` and ``POST /v1/sessions/{id}/end``: what is taken, from whom, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio.lowlevel
import httpx
import pytest
from starlette.middleware import Middleware
from starlette.types import Receive, Scope, Send

from gateway.api.feedback import end_session, give_feedback
from gateway.sessions.sessions import Sessions
from gateway.types import Caller
from reward_hooks import Feedback
from swarm.http.asgi import App, ErrorMiddleware
from swarm.http.routes import JsonRoute
from swarm.job import TrainJob
from tests.gateway.conftest import OpenGateway
from tests.gateway.sessions.talk import Ended, ask, assistant, closed, route, say, user
from tests.standins.swarm import Swarm

pytestmark = pytest.mark.anyio


class Door:
    """A gateway's door with these two addresses; ``key`` says who comes."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self._app = App(
            routes=[
                JsonRoute("/v1/feedback", give_feedback, methods=["POST"]),
                JsonRoute("/v1/sessions/{id:path}/end", end_session, methods=["POST"]),
            ],
            middleware=[Middleware(ErrorMiddleware, body_limit=lambda scope: 64 * 1024)],
        )

    async def post(self, path: str, key: str = "app", **content: Any) -> httpx.Response:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async def hear(*_: object) -> bool:
                return False

            gateway = SimpleNamespace(sessions=self.sessions, pipeline=SimpleNamespace(hear=hear))
            scope["state"] = {"gateway": gateway, "caller": Caller(key)}
            await self._app(scope, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
            return await http.post(path, **content)

    async def feedback(self, completion_id: str, key: str = "app", **said: Any) -> httpx.Response:
        return await self.post("/v1/feedback", key, json={"completion_id": completion_id, **said})


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with Sessions() as sessions:
        yield Door(sessions)


@asynccontextmanager
async def delivered(door: Door, to: Any = None, choices: int = 1) -> AsyncIterator[asyncio.Task[Any]]:
    """An answer ``chatcmpl-a1`` whose group is held open for feedback; yields what closes it."""
    to = to or route(feedback_window_seconds=1000)
    link = ask(door.sessions, to, [user("hi")])
    link.delivered("chatcmpl-a1", assistant("Hello."), 0.5, choices=choices)
    closing = asyncio.create_task(closed(link, to.open_groups))
    await anyio.lowlevel.checkpoint()
    try:
        yield closing
    finally:
        to.open_groups.close()
        async with asyncio.timeout(10):
            await closing


@pytest.mark.parametrize(
    ("said", "feedback"),
    [
        ({"score": 0.5, "comment": "fine"}, Feedback(rating=0.5, comment="fine")),
        ({"label": "good"}, Feedback(rating=1.0)),
        ({"label": "bad"}, Feedback(rating=-1.0)),
        ({"label": "neutral"}, Feedback(rating=0.0)),
        ({"label": "copied"}, Feedback(signals={"copied": 1.0})),
        ({"label": "copied", "score": 1}, Feedback(rating=1.0, signals={"copied": 1.0})),
        ({"signals": {"copied": 0.5, "of_our_own": 1}}, Feedback(signals={"copied": 0.5, "of_our_own": 1.0})),
        ({"comment": "hm"}, Feedback(comment="hm")),
    ],
)
async def test_what_is_said_reaches_the_group(door: Door, said: dict[str, Any], feedback: Feedback) -> None:
    async with delivered(door) as closing:
        response = await door.feedback("chatcmpl-a1", **said)
        assert response.json() == {"completion_id": "chatcmpl-a1", "trains": True, "replaced": False, "compares": False}
        assert not closing.done()
    assert (closing.result().feedback(), closing.result().credit) == ({0: feedback}, 0.0)


async def test_an_answer_is_known_in_every_dialect(door: Door) -> None:
    async with delivered(door):
        for completion_id in ("msg_a1", "resp_a1", "cmpl-a1"):
            assert (await door.feedback(completion_id, score=1)).status_code == 200


async def test_said_again_it_replaces_what_was_said(door: Door) -> None:
    async with delivered(door) as closing:
        await door.feedback("chatcmpl-a1", label="good", comment="nice")
        for replaced in (True, True):
            response = await door.feedback("chatcmpl-a1", label="bad")
            assert response.json()["replaced"] is replaced
    assert closing.result().feedback() == {0: Feedback(rating=-1.0)}


async def test_each_choice_has_its_own(door: Door) -> None:
    async with delivered(door, choices=2) as closing:
        await door.feedback("chatcmpl-a1", score=1, choice=1)
        await door.feedback("chatcmpl-a1", score=-1)
        beyond = await door.feedback("chatcmpl-a1", score=1, choice=2)
        assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "choice")
    assert {place: one.rating for place, one in closing.result().feedback().items()} == {0: -1.0, 1: 1.0}


async def test_what_was_observed_stands_beside_what_was_said(door: Door) -> None:
    async with delivered(door) as closing:
        await door.feedback("chatcmpl-a1", score=1, signals={"continued": 0.25})
        to = route(feedback_window_seconds=1000)
        ask(door.sessions, to, [user("hi"), assistant("Hello."), user("tell me about cats")])
    [feedback] = closing.result().feedback().values()
    # what the application says of a signal goes before what was seen of it
    assert feedback == Feedback(rating=1.0, signals={"continued": 0.25})


async def test_only_the_key_that_got_the_answer_knows_it(door: Door) -> None:
    async with delivered(door) as closing:
        response = await door.feedback("chatcmpl-a1", key="another app", score=-1)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "completion_not_found")
        unknown = await door.feedback("chatcmpl-b1", key="another app", score=-1)
        assert response.text.replace("a1", "b1") == unknown.text
    assert closing.result().feedback() == {}


async def test_what_comes_late_is_kept_for_hooks_and_does_not_train(door: Door) -> None:
    link = say(door.sessions, route(), talk := [user("hi")], "Hello.", completion_id="chatcmpl-late")
    await closed(link)
    response = await door.feedback("chatcmpl-late", score=1)
    assert response.json()["trains"] is False
    later = ask(door.sessions, route(), [*talk, user("and?")])
    assert later.session is not None and later.session.turns[0].feedback is not None
    assert later.session.turns[0].feedback.rating == 1.0
    assert door.sessions.counts.feedback == {"late": 1}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, ""),
        ({"score": 1.5}, "score"),
        ({"score": "1e400"}, "score"),
        ({"label": "great"}, ""),
        ({"label": "good", "score": 1}, ""),
        ({"signals": {"copied": 2}}, "signals.copied"),
        ({"score": 1, "choice": -1}, "choice"),
        ({"score": 1, "odd": 1}, "odd"),
        ({"comment": "x" * 10_001}, "comment"),
    ],
)
async def test_what_makes_no_sense_is_refused(door: Door, body: dict[str, Any], param: str) -> None:
    async with delivered(door):
        response = await door.feedback("chatcmpl-a1", **body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_no_json_is_refused(door: Door) -> None:
    assert (await door.post("/v1/feedback", content=b"{")).status_code == 400
    assert (await door.post("/v1/feedback", content=b'"' + b"x" * 70_000 + b'"')).status_code == 413


# ------------------------------------------------------------------ the end of a session


@pytest.mark.parametrize(
    ("content", "feedback"),
    [
        ({}, None),
        ({"json": {}}, None),
        ({"json": {"label": "good", "comment": "solved"}}, Feedback(rating=1.0, comment="solved")),
    ],
)
async def test_the_application_ends_and_rates_a_session(door: Door, content: Any, feedback: Feedback | None) -> None:
    hook = Ended()
    link = say(door.sessions, route(hook), [user("hi")], "Hello.", headers={"x-swarm-session": "s/1"})
    response = await door.post("/v1/sessions/s%2F1/end", **content)
    # a name with a slash is one name
    assert response.json() == {"session_id": "s/1", "ended": True}
    async with asyncio.timeout(10):
        assert (await closed(link)).credit == 1.0
    assert hook.sessions[0].feedback == feedback


async def test_a_session_ends_once_and_for_its_key_only(door: Door) -> None:
    say(door.sessions, route(Ended()), [user("hi")], "Hello.", headers={"x-swarm-session": "s"})
    answers = [await door.post("/v1/sessions/s/end", key) for key in ("another app", "app", "app")]
    assert [answer.status_code for answer in answers] == [404, 200, 404]
    assert answers[0].json()["error"]["code"] == "session_not_found"


async def test_an_answer_stays_known_while_its_group_waits_for_feedback(door: Door) -> None:
    async with delivered(door) as closing:
        turn = door.sessions.turn("chatcmpl-a1", "app")
        assert turn is not None
        assert door.sessions.end("a1", "app") == 1
        assert (await door.feedback("chatcmpl-a1", score=1)).json()["trains"] is True
        assert not closing.done()
    assert closing.result().feedback()[0].rating == 1.0


RATED = """
def on_compute_relative_reward(task, candidates, context):
    told = [one.feedback.rating if one.feedback and one.feedback.rating else 0 for one in candidates]
    return [rating * (1 if one.request["prompt"] == "b" else 0.5) for rating, one in zip(told, candidates)]
"""


@pytest.mark.parametrize("streamed", [False, True])
async def test_each_choice_of_a_list_of_prompts_is_of_its_own_group(
    swarm: Swarm, open_gateway: OpenGateway, streamed: bool
) -> None:
    # at most half of its slots wait for feedback
    swarm.job = TrainJob(model="tiny", num_repeat=4, batch_size=16)
    settings = {"feedback_window_seconds": 1000, "acknowledge_seconds": 0.0, "reward": RATED}
    asked = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "stream": streamed}
    async with open_gateway(**settings) as http:
        answer = await http.post("/v1/completions", json=asked)
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
        completion_id = json.loads(events[0])["id"]
        for choice, status in ((1, 200), (2, 200), (4, 400)):
            rating = {"completion_id": completion_id, "choice": choice, "score": 1}
            told = await http.post("/v1/feedback", json=rating)
            assert told.status_code == status, told.text
    rewards = [[end["workflow_output"]["reward"] for end in group["ends"]] for group in swarm.ends]
    assert sorted(rewards) == [[0, 0.5, 0, 0], [1, 0, 0, 0]]
