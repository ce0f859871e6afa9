"""Pairs of a run: each counts once, and a restarted server says what the one before said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.evidence.pairs import Pair, SideResult, Terms
from swarm.evidence.ratings import SideRating
from swarm.evidence.verdict import PairedEvidence, Verdict
from swarm.server.engine.controller import Controller
from swarm.server.episodes import evidence as evidence_module
from swarm.server.episodes.episode import ClaimWish
from swarm.server.episodes.evidence import MAX_COMPARISONS, Comparisons
from swarm.server.episodes.stages import Stages
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import ForgottenEvidenceRow, PairRow, RatingRow
from tests.swarm.server import conftest as server
from tests.swarm.server.episodes.test_pool import ends, sample
from tests.swarm.server.test_recovery import CONFIG, granted, rolling

overrides = server.overrides
rig = server.rig


def pair(group: str, ours: float | None = 0.7, theirs: float | None = 0.5, **terms: Any) -> Pair:
    return Pair(
        group_id=group,
        terms=Terms(**{"route": "chat", "incumbent": "gpt", "challenger": 1, "num_repeat": 2} | terms),
        challenger=SideResult(answers=2, reward=ours),
        incumbent=SideResult(reward=theirs),
    )


def test_a_pair_counts_once_and_the_newest_challenger_is_shown() -> None:
    rows: list[PairRow] = []
    found = Comparisons(rows.append, "run")
    for number in range(3):
        found.add(pair(f"g{number}"))
        found.add(pair(f"g{number}", ours=0.1))
    found.add(pair("late", challenger=3))
    found.add(pair("later", challenger=2))
    found.add(pair("elsewhere", route="other"))
    assert [row.group_id for row in rows] == ["g0", "g1", "g2", "late", "later", "elsewhere"]
    assert {row.run_id for row in rows} == {"run"}
    chat, other = found.statuses()
    assert (chat.route, chat.challenger, chat.verdict.requests) == ("chat", 3, 1)
    assert (other.route, other.challenger) == ("other", 1)


def test_other_terms_are_another_comparison() -> None:
    found = Comparisons(lambda row: None)
    others = ({"challenger": 4}, {"code": "x"}, {"num_repeat": 4}, {"model": "m"}, {"incumbent": "other"})
    changes: list[dict[str, Any]] = [{}, *others]
    for number, terms in enumerate(changes * 3):
        found.add(pair(f"g{number}", **terms))
    assert [each.verdict().requests for each in found.followed.values()] == [3] * len(changes)


def test_each_pair_and_each_rating_is_told_and_shown_at_once() -> None:
    told: list[PairedEvidence] = []
    found = Comparisons(lambda _: None, "run", told.append)
    for requests in (1, 2):
        found.add(pair(f"g{requests}"))
        assert [status.verdict.requests for status in found.statuses()] == [requests]
    terms = pair("g").terms
    found.rate(SideRating(answer="a", terms=terms, side="challenger", rating=1))
    assert [status.verdict.rated for status in found.statuses()] == [(1, 0)]
    assert [evidence.terms for evidence in told] == [terms] * 3
    assert found.of(terms.route, terms.incumbent)


@given(
    made=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, MAX_COMPARISONS + 8), st.none() | st.floats(0, 1)), max_size=120
    )
)
def test_rows_give_the_same_statuses(made: list[tuple[int, int, float | None]]) -> None:
    rows: list[PairRow] = []
    found = Comparisons(rows.append, "run")
    for group, challenger, reward in made:
        found.add(pair(f"g{group}", ours=reward, challenger=challenger))
    again = Comparisons(rows.append, "run")
    again.restore(rows[:])
    assert again.statuses() == found.statuses()


def test_a_restart_works_out_the_digest_of_equal_terms_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[PairRow] = []
    before = Comparisons(rows.append, "run")
    for number in range(30):
        before.add(pair(f"g{number}", challenger=number % 3))
    worked_out, digest = list[int | None](), vars(Terms)["digest"].fget
    monkeypatch.setattr(Terms, "digest", property(lambda one: worked_out.append(one.challenger) or digest(one)))
    after = Comparisons(rows.append)
    after.restore(rows)
    assert worked_out == [0, 1, 2]
    assert after.statuses() == before.statuses()


@pytest.mark.anyio
async def test_what_is_proven_of_one_route_is_forgotten_for_no_other(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    before = rolling(journal)
    routes = range(MAX_COMPARISONS + 2)
    for number in range(3):
        for route in routes:
            await before.episodes.record_pair(pair(f"{route} {number}", route=f"r{route}"))
    statuses = before.status().comparisons
    assert {status.verdict.requests for status in statuses} == {3} and len(statuses) == len(routes)
    await journal.close()
    after = Controller(CONFIG)
    after.open(journal := Journal.open(tmp_path / "journal.db"))
    assert after.status().comparisons == statuses
    await journal.close()


def test_those_with_one_incumbent_are_found_without_a_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_module, "MAX_OF_ALL", 150)
    looks = 0

    def counted(terms: Terms, key: Callable[[Terms], tuple[str, str]] = evidence_module._key) -> tuple[str, str]:
        nonlocal looks
        looks += 1
        return key(terms)

    monkeypatch.setattr(evidence_module, "_key", counted)
    comparisons = Comparisons(lambda _: None, "run")
    made = [(route, challenger) for challenger in range(MAX_COMPARISONS + 6) for route in ("a", "b", "c")]
    for route, challenger in made:
        comparisons.add(pair(f"{route} {challenger}", route=route, challenger=challenger))
    assert looks <= 3 * len(made), "what one takes grows with how many there are"
    assert len(comparisons.followed) == 150
    comparisons.forget_above(MAX_COMPARISONS)
    for route in ("a", "b", "c"):
        followed = [each for each in comparisons.followed.values() if each.terms.route == route]
        assert comparisons.of(route, "gpt") == followed != []
    comparisons.forget_above(-1)
    assert comparisons.of("a", "gpt") == [] and not comparisons.followed


def test_draws_of_suites_count_once_outlive_a_restart_and_come_again_for_other_weights() -> None:
    rows: list[PairRow] = []
    comparisons = Comparisons(rows.append, "run")
    for number in (*range(60), *range(60)):
        drawn = pair(f"suite sums@1 {number}", 0.9, suites=("sums@1",)).model_copy(update={"suite": "sums@1"})
        comparisons.add(drawn)
    comparisons.add(pair("live", suites=("sums@1",)))
    [status] = comparisons.statuses()
    assert status.verdict.suites == {"sums@1": "better"} and len(rows) == 61
    again = Comparisons(rows.append, "run")
    again.restore(rows[:])
    assert again.statuses() == [status]
    again.forget_above(0)
    again.add(drawn)
    assert again.statuses()[0].verdict.suites == {"sums@1": "undecided"}


def test_a_late_pair_of_weights_that_the_engine_went_back_from_counts_for_nobody() -> None:
    rows: list[PairRow | ForgottenEvidenceRow] = []
    stages = Stages(lambda _: None)
    comparisons = Comparisons(rows.append, "run", is_left=stages.is_left)
    stages.serves(25)
    comparisons.add(pair("early", challenger=25))
    # the engine died, and goes on from an earlier checkpoint; a slow judge ends now
    stages.serves(20)
    comparisons.forget_above(20)
    comparisons.add(pair("late", challenger=25))
    # what comes again as 25 is other weights
    stages.serves(25)
    comparisons.add(pair("new", challenger=25))
    [status] = comparisons.statuses()
    assert status.verdict.requests == 1
    assert [row.group_id for row in rows if isinstance(row, PairRow)] == ["early", "new"]


@pytest.mark.anyio
async def test_the_pair_is_on_disk_with_the_end_of_its_group(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    before = rolling(journal)
    grant = await granted(before, ClaimWish("me", episodes=2, as_group=True, max_seconds=1000.0))
    for one in grant.claims:
        sample(before.pool, one)
    for _ in range(2):
        # a repetition changes nothing
        await before.episodes.end("me", "task", ends(*grant.claims), as_group=True, pair=pair("group"))
    for name in ("untrained", "another", "another"):
        await before.episodes.record_pair(pair(name))
    await before.episodes.record_pair(pair("alone", ours=None))
    said = before.status().comparisons
    assert said[0].verdict.sentence.startswith("not decided: +0.20 [")
    assert "held back: 1 of 4 requests were not judged" in said[0].verdict.sentence
    await journal.close()

    journal = Journal.open(tmp_path / "journal.db")
    after = Controller(CONFIG)
    after.open(journal)
    assert after.status().comparisons == said
    await journal.close()


@pytest.mark.anyio
async def test_ratings_of_requests_with_one_name_are_the_same_after_a_restart(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    before = rolling(journal)
    early, late = (pair(f"canary {share}", stage=f"canary {share}", share=share) for share in (0.05, 0.25))
    for one in (early, late):
        await before.episodes.record_pair(one)
        for side in ("challenger", "incumbent"):
            await before.episodes.record_rating(SideRating(answer="a", terms=one.terms, side=side, rating=1))
    # said once more of the same answer, it takes the place of the first
    await before.episodes.record_rating(SideRating(answer="a", terms=early.terms, side="incumbent", rating=-1))

    def said(controller: Controller) -> dict[str, Verdict]:
        return {name: followed.verdict() for name, followed in controller.pool.comparisons.followed.items()}

    verdicts = said(before)
    assert [verdict.rated for verdict in verdicts.values()] == [(1, 1), (1, 1)]
    await journal.close()
    journal = Journal.open(tmp_path / "journal.db")
    after = Controller(CONFIG)
    after.open(journal)
    assert said(after) == verdicts
    await journal.close()


def test_ratings_of_a_server_before_whose_rules_had_another_field_still_count() -> None:
    """Its journal names comparisons by another digest."""

    def written(value: Pair | SideRating) -> str:
        data = value.model_dump(mode="json")
        data["terms"]["rules"]["max_latency"] = None
        return json.dumps(data)

    rating = SideRating(answer="a", terms=pair("g").terms, side="challenger", rating=1)
    found = Comparisons(lambda _: None)
    found.restore([PairRow("run", "g", "older", written(pair("g")))], [RatingRow("run", "a", "older", written(rating))])
    assert [followed.verdict().rated for followed in found.followed.values()] == [(1, 0)]


@pytest.mark.anyio
async def test_pairs_over_the_wire(rig: server.Rig) -> None:
    body = {"client_uuid": "me", "pair": pair("g").model_dump()}
    for _ in range(2):
        assert (await rig.post("/record_pair", **body))["success"]
    [said] = (await rig.client.get("/status")).json()["comparisons"]
    assert (said["route"], said["incumbent"], said["challenger"]) == ("chat", "gpt", 1)
    assert said["verdict"]["requests"] == 1 and not said["verdict"]["promotable"]
    wrong = await rig.client.post("/record_pair", json={"client_uuid": "me", "pair": {}})
    assert wrong.status_code in (400, 422)


@pytest.mark.anyio
async def test_ratings_count_where_something_is_compared_and_outlive_a_restart(tmp_path: Path) -> None:
    def open_journal() -> tuple[Controller, Journal]:
        controller = Controller(CONFIG)
        controller.open(journal := Journal.open(tmp_path / "journal.db"))
        return controller, journal

    before = rolling(journal := Journal.open(tmp_path / "journal.db"))
    await before.episodes.record_pair(pair("g"))
    for number in range(60):
        for side, value in (("challenger", -1.0), ("incumbent", 1.0)):
            rating = SideRating(answer=f"{side} {number}", terms=pair("g").terms, side=side, rating=value)
            await before.episodes.record_rating(rating)
    # said again, it replaces; under terms that nothing is compared under, it says nothing
    await before.episodes.record_rating(
        SideRating(answer="challenger 0", terms=pair("g").terms, side="challenger", rating=0)
    )
    await before.episodes.record_rating(
        SideRating(answer="alone", terms=pair("g", challenger=9).terms, side="challenger", rating=1)
    )
    [said] = before.status().comparisons
    assert said.verdict.rated == (60, 60) and said.verdict.guards == ("rating_drop",)
    await journal.close()

    after, journal = open_journal()
    assert after.status().comparisons == [said]
    after.run.pool.comparisons.forget_above(0)
    await after.episodes.synced()
    await journal.close()
    again, journal = open_journal()
    assert again.status().comparisons == []
    again.run.pool.comparisons.add(pair("g2"))
    assert again.status().comparisons[0].verdict.rated == (0, 0), "the ratings were of other weights"
    await journal.close()


@pytest.mark.anyio
async def test_a_rating_over_the_wire(rig: server.Rig) -> None:
    await rig.post("/record_pair", client_uuid="me", pair=pair("g").model_dump())
    body = {"answer": "a", "terms": pair("g").terms.model_dump(), "side": "incumbent"}
    assert (await rig.post("/record_rating", client_uuid="me", rating=body | {"rating": 0.5}))["success"]
    [said] = (await rig.client.get("/status")).json()["comparisons"]
    assert said["verdict"]["rated"] == [0, 1]
    wrong = await rig.client.post("/record_rating", json={"client_uuid": "me", "rating": body | {"rating": 1.5}})
    assert wrong.status_code in (400, 422)
