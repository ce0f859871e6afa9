"""Groups as the page shows them, and judgements: what trains, what counts as evidence, and the stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.page.judging import GivenJudgement, Judgements
from gateway.page.kept_groups import KeptAnswer, KeptGroup
from gateway.page.stream import Events
from gateway.sessions.conversation import DeliveredTurn
from gateway.types import Caller
from swarm.client import AsyncSwarmClient
from swarm.credentials import append_private
from swarm.errors import AuthenticationError, UnavailableError
from swarm.intervals import wilson_interval
from swarm.status import ServerStatus
from swarm.types import Notes
from tests.gateway.conftest import OpenGateway
from tests.gateway.page.conftest import Site, site_before
from tests.standins.swarm import Swarm, said

pytestmark = pytest.mark.anyio


async def test_a_group_has_all_answers_with_rewards_reasons_and_weights(site: Site) -> None:
    await site.ask("how many words?")
    visitor = await site.visit("look")
    [row] = await visitor.groups()
    assert row["prompt"] == "how many words?" and row["key"] == "shop" and row["fate"] == "trained"
    group = await visitor.get(f"/groups/{row['id']}")
    answers = group["answers"]
    assert [answer["reward"] for answer in answers] == [0.1, 0.2, 0.3, 0.4]
    assert answers[3]["delivered"] and not answers[0]["delivered"]
    assert answers[3]["components"]["words"] == 4 and answers[3]["reason"] == "4 words are many"
    assert answers[3]["tokens"] == 3


async def test_views_find_groups_by_rewards_words_and_what_people_said(site: Site, swarm: Swarm) -> None:
    await site.ask("apples")
    swarm.answer = lambda body, number: said("same words")
    await site.ask("pears")
    visitor = await site.visit("judge")

    async def prompts(**query: Any) -> list[str]:
        return [row["prompt"] for row in await visitor.groups(**query)]

    assert await prompts() == ["pears", "apples"]
    assert await prompts(view="best") == ["apples", "pears"] and await prompts(view="worst") == ["pears", "apples"]
    assert await prompts(view="spread") == ["apples", "pears"]
    assert await prompts(view="equal") == ["pears"]
    assert await prompts(words="APPLES") == ["apples"] and await prompts(words="apples pears") == []
    assert await prompts(key="shop") == ["pears", "apples"] and await prompts(key="other") == []
    apples = (await visitor.groups(words="apples"))[0]["id"]
    assert (await visitor.judge(apples, pick=3)).json()["agrees"] is True
    assert await prompts(view="disagree") == []
    assert (await visitor.judge(apples, pick=0)).json()["agrees"] is False
    assert await prompts(view="disagree") == ["apples"] and await prompts(view="unjudged") == ["pears"]


async def test_a_judgement_trains_while_the_group_is_open(
    open_gateway: OpenGateway, swarm: Swarm, tmp_path: Path
) -> None:
    settings = {"feedback_window_seconds": 1000, "acknowledge_seconds": 0.0}
    async with site_before(open_gateway, tmp_path, **settings) as site:
        await site.ask()
        visitor = await site.visit("judge")
        [row] = await visitor.groups()
        assert row["open"] and row["fate"] == ""
        kept = (await visitor.judge(row["id"], pick=1, correction="better", blind=True)).json()
        assert kept["trains"] and kept["who"] == "Jo"
        # the gateway goes: the group is closed with what was judged
    rewards = [output["reward"] for output in ends(swarm)]
    assert rewards == [0.0, 1.0, 0.0, 0.0]
    [line] = [json.loads(line) for line in (tmp_path / "judgements.jsonl").read_text().splitlines()]
    assert line["pick"] == 1 and line["correction"] == "better" and line["blind"] and line["when"]


async def test_what_is_undone_does_not_train_and_is_no_evidence(
    open_gateway: OpenGateway, swarm: Swarm, tmp_path: Path
) -> None:
    settings = {"feedback_window_seconds": 1000, "acknowledge_seconds": 0.0}
    async with site_before(open_gateway, tmp_path, **settings) as site:
        await site.ask()
        visitor = await site.visit("judge")
        [row] = await visitor.groups()
        await visitor.judge(row["id"], pick=1)
        assert (await visitor.undo(row["id"])).status_code == 200
        assert (await visitor.get("/groups"))["agreement"]["judged"] == 0
        assert (await visitor.undo(row["id"])).json()["error"]["code"] == "nothing_to_undo"
    assert [output["reward"] for output in ends(swarm)] == [0.1, 0.2, 0.3, 0.4]
    assert Judgements(tmp_path / "judgements.jsonl").agreement(lambda route: True)["judged"] == 0


async def test_a_late_judgement_is_evidence_and_outlives_the_gateway(site: Site, tmp_path: Path) -> None:
    await site.ask()
    visitor = await site.visit("judge")
    [row] = await visitor.groups()
    kept = (await visitor.judge(row["id"], pick=3)).json()
    answer = await visitor.get("/groups")
    assert not kept["trains"] and answer["agreement"]["share"] == 1.0
    assert answer["groups"][0]["fate"] == "trained"
    with (tmp_path / "judgements.jsonl").open("a") as file:
        file.write('no json\n{"group": "g"}\n')
    again = Judgements(tmp_path / "judgements.jsonl").agreement(lambda route: True)
    assert (again["compared"], again["share"], again["chance"]) == (1, 1.0, 0.25)


async def test_an_answer_of_any_length_that_is_shown_is_corrected(site: Site, tmp_path: Path) -> None:
    await site.ask()
    visitor = await site.visit("judge")
    (group,) = await visitor.groups()
    corrected = "\U0001f600" * 60_000
    assert (await visitor.judge(group["id"], pick=1, correction=corrected)).status_code == 200
    assert corrected in json.loads((tmp_path / "judgements.jsonl").read_text())["correction"]


async def test_none_is_good_compares_nothing(site: Site) -> None:
    await site.ask()
    visitor = await site.visit("judge")
    [row] = await visitor.groups()
    await visitor.judge(row["id"], pick=None)
    agreement = (await visitor.get("/groups"))["agreement"]
    assert (agreement["judged"], agreement["compared"], agreement["share"]) == (1, 0, None)


@pytest.mark.parametrize("body", [{"pick": 4}, {"pick": -1}, {"pick": 0, "comment": "x" * 10_001}, {"who": "me"}])
async def test_a_wrong_judgement_is_refused(site: Site, body: dict[str, Any]) -> None:
    await site.ask()
    visitor = await site.visit("judge")
    [row] = await visitor.groups()
    assert (await visitor.judge(row["id"], **body)).status_code == 400


async def test_a_judgement_that_cannot_be_kept_does_not_count(site: Site, tmp_path: Path) -> None:
    await site.ask()
    visitor = await site.visit("judge")
    [row] = await visitor.groups()
    (tmp_path / "judgements.jsonl").mkdir()
    assert (await visitor.judge(row["id"], pick=0)).status_code == 409
    assert (await visitor.groups())[0]["picks"] == {}


async def test_a_hook_that_fails_and_a_server_that_is_gone_are_said(
    open_gateway: OpenGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.page.learning._AGE", -1.0)
    reward = "def on_compute_relative_reward(task, candidates, context):\n    raise ValueError('no rewards today')\n"
    async with site_before(open_gateway, tmp_path, reward=reward) as site:
        await site.ask()
        visitor = await site.visit("look")
        [row] = await visitor.groups()
        assert row["rewards"] == [None] * 4 and "raised ValueError" in row["why"]
        before = await visitor.get("/learning")
        [server], [route] = before["servers"], before["routes"]
        assert (server["problem"], server["step"]) == ("", 7)
        assert sum(route["hook_failures"].values()) == 1
        assert [text for text in route["hook_errors"] if "raised ValueError" in text]

        async def gone(*_: object, **__: object) -> ServerStatus:
            raise UnavailableError("the swarm server is away")

        monkeypatch.setattr(AsyncSwarmClient, "status", gone)
        [after] = (await visitor.get("/learning"))["servers"]
        assert after["problem"] == "the swarm server is away"
        assert (after["at"], after["step"]) == (server["at"], 7), "what was last known stands, with its age"


async def test_a_group_that_closes_while_its_judgement_is_written_is_told_so_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judgements, group = Judgements(tmp_path / "j.jsonl"), rated(1.0, 0.0)
    group.turn = cast("DeliveredTurn", SimpleNamespace(judgements={}, open=True, rules=None))

    def close(path: Path, entry: dict[str, Any]) -> None:
        append_private(path, entry)
        group.fate = "trained"

    monkeypatch.setattr("gateway.page.judging.append_private", close)
    kept = await judgements.judge(group, "Jo", GivenJudgement(pick=0))
    assert not kept["trains"]
    lines = [json.loads(line)["trains"] for line in (tmp_path / "j.jsonl").read_text().splitlines()]
    assert lines == [True, False]
    assert Judgements(tmp_path / "j.jsonl").agreement(lambda _: True)["judged"] == 1


async def test_a_group_counts_once_however_many_people_judged_it(tmp_path: Path) -> None:
    judgements = Judgements(None)
    shared, other = rated(1.0, 0.0), rated(1.0, 0.0, 0.0, 0.0)
    other.id = "other"
    for who, pick in (("Jo", 0), ("Ada", 0), ("Lena", 1)):
        await judgements.judge(shared, who, GivenJudgement(pick=pick))
    await judgements.judge(other, "Jo", GivenJudgement(pick=3))
    told = judgements.agreement(lambda _: True)
    assert (told["judged"], told["compared"], told["chance"]) == (4, 2, (0.5 + 0.25) / 2)
    assert told["share"] == pytest.approx((2 / 3 + 0) / 2)


async def test_rewards_of_a_call_that_knew_of_feedback_are_no_evidence() -> None:
    group = rated(1.0, 0.0)
    group.knew = True
    assert (await Judgements(None).judge(group, "Jo", GivenJudgement(pick=0)))["agrees"] is None


def rated(*rewards: float | None) -> KeptGroup:
    kept = KeptGroup("g", 0.0, "r", "k", "", Notes(), [], 0, None)
    for index, reward in enumerate(rewards):
        kept.answers[index] = KeptAnswer(index, "", "", [], "stop", 0, None, 0.0, reward)
    return kept


def ends(swarm: Swarm) -> list[dict[str, Any]]:
    """The outputs of the one group that ended, in the order of its answers."""
    [end] = swarm.ends
    outputs = [episode["workflow_output"] for episode in end["ends"]]
    return sorted(outputs, key=lambda output: output["log_metrics"]["words"])


def test_the_interval_of_a_share_is_wilsons() -> None:
    share, low, high = wilson_interval(8, 10, 0.95)
    assert (share, round(low, 3), round(high, 3)) == (0.8, 0.490, 0.943)
    assert wilson_interval(0, 0, 0.95)[1:] == (0.0, 1.0)


def test_equal_rewards_have_no_best_and_the_users_word_counts() -> None:
    assert rated(1.0, 1.0).best == [] and rated(None).best == []
    assert rated(1.0, 0.0, 1.0, None).best == [0, 2]
    kept = rated(1.0, 0.0)
    kept.answers[0].delivered, kept.user = True, -1.0
    assert kept.disagrees


# ---------------------------------------------------------------------- the stream


async def read(stream: AsyncIterator[bytes], kind: str) -> dict[str, Any]:
    """The next event of this kind."""
    async with asyncio.timeout(20):
        async for part in stream:
            for event in part.decode().split("\n\n"):
                fields = dict(line.split(": ", 1) for line in event.splitlines() if ": " in line)
                if fields.get("event") == kind:
                    return {"event": fields.get("id", ""), **json.loads(fields["data"])}
    raise AssertionError("the stream ended")


def follow(events: Events, last: str = "", caller: Caller | None = None, why: str = "") -> AsyncIterator[bytes]:
    def look() -> Caller:
        if why:
            raise AuthenticationError(why)
        return caller or Caller()

    return events.follow(look, last)


async def test_a_stream_goes_on_where_it_was_cut() -> None:
    events = Events()
    first = follow(events)
    await read(first, "hello")
    events.add("a", "r", {"id": "a"})
    event = await read(first, "group")
    events.add("b", "r", {"id": "b"})
    resumed = follow(events, event["event"])
    await read(resumed, "hello")
    assert (await read(resumed, "group"))["id"] == "b"


@pytest.mark.parametrize("last", ["other-1", "x", "-", "²", "1" * 5000])
async def test_a_page_that_missed_too_much_reads_everything_anew(last: str) -> None:
    events = Events()
    await read(follow(events, last), "reset")
    before = events.latest
    for number in range(3000):
        events.add(str(number), "r", {})
    await read(follow(events, before), "reset")
    await read(follow(events, str(int(before) + 999)), "reset")
    assert (await read(follow(events, str(int(before) + 1000)), "group"))["event"] == str(int(before) + 1001)
    await read(follow(events, str(int(before) + 9999)), "reset")


async def test_of_one_group_the_last_row_is_sent_and_of_other_routes_none() -> None:
    events = Events()
    start = events.latest
    for number in range(3):
        events.add("a", "mine", {"number": number})
        events.add("b", "other", {"number": number})
    stream = follow(events, start, Caller("k", frozenset({"mine"})))
    assert (await read(stream, "group"))["number"] == 2


async def test_a_stream_that_was_cut_within_a_burst_goes_on_behind_the_last_row_that_came() -> None:
    events = Events()
    start = events.latest
    for name in "abc":
        events.add(name, "r", {"id": name})
    event = await read(follow(events, start), "group")
    assert event["id"] == "a"
    assert (await read(follow(events, event["event"]), "group"))["id"] == "b"


async def test_routes_that_are_taken_from_a_key_are_told_no_longer() -> None:
    events, routes = Events(), {"mine", "other"}
    stream = events.follow(lambda: Caller("k", frozenset(routes)), "")
    await read(stream, "hello")
    events.add("a", "mine", {"id": "a"})
    assert (await read(stream, "group"))["id"] == "a"
    routes.remove("mine")
    events.add("b", "mine", {"id": "b"})
    events.add("c", "other", {"id": "c"})
    assert (await read(stream, "group"))["id"] == "c"


async def test_a_stream_of_a_key_that_is_revoked_ends_with_the_reason() -> None:
    stream = follow(Events(), why="this API key is revoked")
    assert (await read(stream, "bye"))["why"] == "this API key is revoked"
    assert [part async for part in stream] == []


async def test_the_stream_over_http_tells_of_a_group(site: Site) -> None:
    visitor = await site.visit("look")
    async with visitor.http.stream("GET", "/ui/api/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = answer.aiter_bytes()
        await read(parts, "hello")
        await site.ask("live")
        assert (await read(parts, "group"))["prompt"] == "live"
