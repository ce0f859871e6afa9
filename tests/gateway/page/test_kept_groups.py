"""Groups as the page keeps them beside the requests: what comes late, what fails, and what is forgotten."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.responses import Response

from gateway.page.judging import GivenJudgement, Judgements
from gateway.page.kept_groups import KeptGroup, KeptGroups
from gateway.page.selection import GroupQuery, select
from gateway.page.stream import Events
from gateway.sessions.conversation import WatchedGroup
from gateway.types import Caller
from reward_hooks import Candidate, Feedback, GroupScore, Reward
from swarm.errors import NotFoundError
from swarm.subjects import Subject
from swarm.types import Notes
from tests.gateway.conftest import OpenGateway, ask
from tests.standins.swarm import Swarm, by_number, made, said

pytestmark = pytest.mark.anyio

#: Waits for a third answer before it judges two; the later call waits for nothing.
SLOW = """
import asyncio, pathlib
async def on_compute_relative_reward(task, candidates, context):
    folder = pathlib.Path(__file__).parent
    (folder / "asked").touch()
    while not (folder / "go").exists():
        await asyncio.sleep(0.001)
    return [float(candidate.index) for candidate in candidates]
"""


def held(swarm: Swarm, last: Callable[[], Response] = lambda: said("a b c d e")) -> asyncio.Event:
    """Holds the last answer of the group back, until the event is set."""
    go = asyncio.Event()

    async def answer(body: dict[str, Any], number: int) -> Response:
        if number < 3:
            return await made(by_number(body, number))
        await go.wait()
        return last()

    swarm.answer, swarm.grouped = answer, False
    return go


async def test_an_answer_that_comes_while_the_hook_judges_fails_no_request(
    open_gateway: OpenGateway, swarm: Swarm, tmp_path: Path
) -> None:
    go, hooks = held(swarm), tmp_path / "hooks"
    async with open_gateway(ui={}, reward=SLOW, quorum=3, acknowledge_seconds=0.0) as http:
        asking = asyncio.create_task(ask(http))
        async with asyncio.timeout(20):
            while not (hooks / "asked").exists():
                await http.get("/health")
            go.set()
            await swarm.until(lambda: swarm.sampling == 0)
            # the gateway reads the answer before it answers this
            await http.get("/status")
            (hooks / "go").touch()
            answer = await asking
            assert answer.status_code == 200, answer.text
            while len((await http.get("/ui/api/groups")).json()["groups"][0]["rewards"]) < 4:
                pass


async def test_a_page_that_fails_harms_no_request(
    open_gateway: OpenGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    for name in ("judged", "settling", "over"):
        monkeypatch.setattr(KeptGroups, name, fail)
    async with open_gateway(ui={}) as http:
        answer = await ask(http)
        assert (answer.status_code, answer.headers["x-swarm-trained"]) == (200, "true")
    assert "what watches the groups has failed" in caplog.text


async def test_a_late_private_answer_takes_its_group_off_the_page(open_gateway: OpenGateway, swarm: Swarm) -> None:
    go = held(swarm, lambda: said("write to anna.schmidt@example.org"))
    async with open_gateway(ui={}, quorum=3, acknowledge_seconds=0.0, data={"redact": "group"}) as http:
        assert (await ask(http)).status_code == 200
        assert len((await http.get("/ui/api/groups")).json()["groups"]) == 1
        async with http.stream("GET", "/ui/api/events") as stream:
            parts = stream.aiter_text()
            go.set()
            async with asyncio.timeout(20):
                while "event: reset" not in await anext(parts):
                    pass
        assert (await http.get("/ui/api/groups")).json()["groups"] == []


def watched(
    name: str, *rewards: float, user: str = "", feedback: Feedback | None = None, indices: tuple[int, ...] = ()
) -> WatchedGroup:
    caller = SimpleNamespace(label="shop", key_id="k")
    call = SimpleNamespace(body={}, messages=[{"role": "user", "content": f"prompt of {name}"}])
    incoming = cast("Any", SimpleNamespace(caller=caller, call=call, request_id=f"req-{name}"))
    candidates = [
        Candidate(index=place, message={"role": "assistant", "content": "text"}, feedback=feedback)
        for place in range(len(rewards))
    ]
    return WatchedGroup(
        name,
        incoming,
        "default",
        "",
        Notes(key="k", user=user, request_id=f"req-{name}", hook="hook"),
        indices or tuple(range(len(rewards))),
        candidates,
        GroupScore(rewards=[Reward(value=reward) for reward in rewards]),
        None,
        None,
    )


class Told(Events):
    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self.told = told

    def add(self, group_id: str, route: str, row: dict[str, Any]) -> None:
        self.told.append(group_id)
        super().add(group_id, route, row)


class Page:
    """Kept groups with their judgements; ``told`` are the ids of groups that have changed."""

    def __init__(self, path: Path | None = None, max_bytes: int = 2**20) -> None:
        self.told: list[str] = []
        self.judgements = Judgements(path)
        self.events = Told(self.told)
        self.groups = KeptGroups(max_bytes, self.events, self.judgements.erase)

    def show(self, group: WatchedGroup) -> KeptGroup:
        self.groups.judged(group)
        return self.groups.group(group.group_id, Caller())


def test_rewards_of_two_calls_are_not_mixed() -> None:
    kept = Page().show(watched("g", 0.5, 0.4))
    page = Page()
    kept = page.show(watched("g", 0.5, 0.4))
    told = Feedback(rating=1.0)
    page.show(watched("g", 0.1, 0.2, 9.0, feedback=told, indices=(0, 1, 2)))
    assert (kept.rewards, kept.best, kept.knew) == ([0.5, 0.4], [0], False)
    assert [answer.final for answer in kept.answers.values()] == [0.1, 0.2, 9.0]
    # a call that knew nothing replaces all of them
    page.show(watched("g", 0.1, 0.2, 0.3, indices=(0, 1, 2)))
    assert kept.best == [2]
    assert page.show(watched("late", 1.0, 0.0, feedback=told)).knew


def test_an_answer_that_is_cut_says_so() -> None:
    whole = watched("g", 0.5)
    long = whole.candidates[0].model_copy(update={"text": "word " * 20_000})
    [answer] = Page().show(replace(whole, candidates=[long])).answers.values()
    assert len(answer.text) < 70_000 and answer.text.endswith(f"[{100_000 - 65_536} more characters are not kept]")


async def test_what_people_say_is_weighed() -> None:
    page = Page()
    kept = page.show(watched("g", 0.5, 0.4))
    before = page.groups.bytes
    await page.judgements.judge(kept, "Jo", GivenJudgement(pick=0, comment="x" * 5000, correction="y" * 5000))
    page.groups.touched(kept)
    assert page.groups.bytes > before + 10_000 and page.told == ["g", "g"]
    assert "xxx" not in str(vars(page.judgements)), "the figures need no texts"


async def test_what_is_picked_and_what_is_delivered_are_places_among_the_answers_that_came() -> None:
    page = Page()
    # the first of four answers failed, and the second came late
    page.show(watched("g", 0.5, 0.4, indices=(2, 3)))
    kept = page.show(watched("g", 0.5, 0.4, 0.9, indices=(2, 3, 1)))
    page.groups.settling("g", [2], None)
    await page.judgements.judge(kept, "Jo", GivenJudgement(pick=1))
    await page.judgements.judge(kept, "Ada", GivenJudgement())
    assert (kept.row()["delivered"], kept.row()["picks"]) == ([0], {"Jo": 2, "Ada": None})


async def test_a_search_lets_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    page, turn, waited = Page(), threading.Event(), list[bool]()
    kept = page.show(watched("g", 0.5, 0.4))

    def texts(message: dict[str, Any]) -> list[str]:
        waited.append(turn.wait(30))
        return ["prompt"]

    monkeypatch.setattr("gateway.page.selection.texts_of", texts)
    searching = asyncio.create_task(select(page.groups.opened(Caller()), GroupQuery(words="prompt")))
    await asyncio.sleep(0)
    page.show(watched("g", 1.0, indices=(2,)))
    turn.set()
    assert await searching == [kept] and waited == [True]


async def test_groups_whose_challenger_lost_are_found() -> None:
    page = Page()
    for name, lead in (("won", 0.2), ("lost", -0.1), ("worst", -0.4)):
        page.show(watched(name, 0.5, 0.4))
        page.groups.compared(name, lead)
    page.groups.compared("gone", -1.0)
    assert [group.id for group in await select(page.groups.opened(Caller()), GroupQuery(view="lost"))] == [
        "worst",
        "lost",
    ]


async def test_what_is_deleted_of_a_person_leaves_the_page_and_the_judgements(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    page = Page(path)
    hers, his = page.show(watched("hers", 1.0, 0.0, user="she")), page.show(watched("his", 1.0, 0.0, user="he"))
    gone = page.show(watched("gone", 1.0, 0.0, user="she"))
    for group in (hers, his, gone):
        await page.judgements.judge(group, "Jo", GivenJudgement(pick=0, comment=f"about {group.id}"))
        await page.judgements.undo(group, "Jo")
        await page.judgements.judge(group, "Ada", GivenJudgement(pick=0))
    page.groups.forget("gone")
    gone.erased = False
    done = await page.groups.erase(Subject(user="she").fits)
    assert done == {"page_groups": 1, "judgements": 6}
    assert [json.loads(line)["group"] for line in path.read_text().splitlines()] == ["his"] * 3
    assert page.judgements.agreement(lambda _: True)["judged"] == 1
    assert [group.id for group in page.groups.opened(Caller())] == ["his"]
    # what was under way is not written behind it
    with pytest.raises(NotFoundError):
        await page.judgements.judge(hers, "Jo", GivenJudgement(pick=0))
    assert "about hers" not in path.read_text()
    assert (await page.groups.erase(lambda notes: notes.request_id == "req-his"))["judgements"] == 3
    assert path.read_text() == "" and page.groups.opened(Caller()) == []


async def test_what_is_deleted_of_a_group_that_had_left_is_streamed_to_nobody() -> None:
    page = Page(max_bytes=1)
    begin = page.events.latest
    for name in ("hers", "his"):
        page.show(watched(name, 1.0, 0.0, user=name))
    await page.groups.erase(Subject(user="hers").fits)
    stream = page.events.follow(Caller, begin)
    assert b"event: hello" in await anext(stream)
    assert b"event: reset" in (reset := await anext(stream)) and b"hers" not in reset
    page.groups.compared("his", 0.5)
    assert b'"id":"his"' in (row := await anext(stream)) and b"hers" not in row
