"""The pointers of a server: compare-and-set, one row for each version, and the same after a restart at any moment."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.checkpoints import held_steps
from swarm.errors import ConflictError, NotFoundError, RequestError, SwarmGatewayError, UnavailableError
from swarm.evidence.stages import SERVER, JobTerms, ServingStage, StageRules
from swarm.protocol import FollowedRoute
from swarm.server.engine.controller import Controller
from swarm.server.episodes.evidence import Comparisons
from swarm.server.episodes.stages import FOLLOWED_SECONDS, Stages
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import StageRow, StepRow
from swarm.server.kept import HeldPolicies
from swarm.types import StepResult
from tests.swarm.server import conftest as server
from tests.swarm.server.episodes.test_comparisons import pair
from tests.swarm.server.test_recovery import CONFIG, rolling

overrides = server.overrides
rig = server.rig

RULES = StageRules(mode="auto", trial_every=2, trial_requests=40)


def followed(route: str, rules: StageRules = RULES, incumbent: str = "gpt", version: int = 0) -> FollowedRoute:
    return FollowedRoute(route=route, incumbent=incumbent, incumbent_version=version, rules=rules)


ROUTES = [followed("chat"), followed("code", RULES.model_copy(update={"begins": "canary"}))]


def opened(**more: Any) -> tuple[Stages, list[StageRow]]:
    rows: list[StageRow] = []
    stages = Stages(rows.append, **more)
    stages.begin_run("run")
    stages.follow(ROUTES)
    return stages, rows


def restored(rows: list[StageRow]) -> Stages:
    again = Stages(lambda _: None)
    latest = {(row.route, row.incumbent): row for row in rows if row.run_id == rows[-1].run_id}
    again.restore(rows[-1].run_id, latest.values())
    return again


def test_weights_that_were_served_before_a_restart_are_known_once_the_engine_goes_back() -> None:
    stages, rows = opened()
    stages.serves(5)
    # the server was killed before the step was recorded
    for each in (stages, restored(rows)):
        each.serves(4)
        assert each.is_left(5)


@pytest.mark.parametrize(
    ("route", "incumbent", "message"),
    [
        ("shop", "", "no route 'shop' with an incumbent is known here: chat before gpt; code before gpt"),
        ("chat", "gtp", "no route 'chat' with the incumbent 'gtp' is known here: chat before gpt; code before gpt"),
    ],
)
def test_what_is_not_known_is_named(route: str, incumbent: str, message: str) -> None:
    with pytest.raises(NotFoundError) as refused:
        opened()[0].find(route, incumbent)
    assert refused.value.message == message
    with pytest.raises(NotFoundError, match=r"^no route with an incumbent is known here: none$"):
        Stages(lambda _: None).find("", "")


OPERATIONS = st.one_of(
    st.tuples(st.just("serves"), st.integers(0, 9)),
    st.tuples(st.just("pairs"), st.sampled_from([(0.9, 0.1), (0.1, 0.9), (None, 0.5)])),
    st.tuples(st.just("promote"), st.sampled_from([None, 0.05, 0.5, 1.0])),
    st.tuples(st.just("roll_back"), st.none()),
    st.tuples(st.just("pin"), st.booleans()),
    st.tuples(st.just("stale"), st.none()),
    st.tuples(st.just("run"), st.none()),
)


@given(operations=st.lists(OPERATIONS, max_size=25))
def test_each_change_is_the_next_version_and_one_row_and_any_beginning_of_the_rows_is_one_stage(
    operations: list[tuple[str, Any]],
) -> None:
    stages, rows = opened()
    comparisons = Comparisons(lambda _: None, on_evidence=stages.judged)
    groups = 0
    for number, (what, value) in enumerate(operations):
        before, changes = stages.find("chat", ""), stages.changes
        try:
            match what:
                case "serves":
                    stages.serves(value)
                case "pairs":
                    for _ in range(12):
                        groups += 1
                        terms = {"challenger": before.challenger, "stage": before.label, "share": 0.0}
                        comparisons.add(pair(f"g{groups}", ours=value[0], theirs=value[1], **terms))
                case "promote":
                    stages.promote(before, before.version, "ann", "because", share=value)
                case "roll_back":
                    stages.roll_back(before, before.version, "ann", "because")
                case "pin":
                    stages.pin(before, before.version, "ann", "because", pinned=value)
                case "stale":
                    with pytest.raises(ConflictError, match="has moved since"):
                        stages.promote(before, before.version - 1, "bob", "late")
                    assert stages.find("chat", "") is before
                case _:
                    stages.begin_run(f"run{number}")
        except SwarmGatewayError:
            assert stages.find("chat", "") is before and stages.changes == changes
        after = stages.find("chat", "")
        assert after is before or (after.version > before.version and stages.changes > changes)
        # by itself it rises only where a trial of this very version is proven
        if after.share > before.share and what != "promote":
            assert what == "pairs" and before.rules.mode == "auto" and not before.pinned
        assert not after.trial or after.rules.trial_every is not None
    keys = [(row.run_id, row.route, row.version) for row in rows]
    assert len(set(keys)) == len(keys)
    for end in range(1, len(rows) + 1):
        again = restored(rows[:end])
        for stage in again.pointers.values():
            assert stage == ServingStage.model_validate_json(stage.model_dump_json()) and 0 <= stage.share <= 1
    assert restored(rows).pointers == stages.pointers


def test_of_two_who_saw_the_same_one_moves_it() -> None:
    stages, _ = opened()
    stages.serves(0)
    saw = stages.find("chat", "gpt")
    stages.promote(saw, saw.version, "ann", "first")
    with pytest.raises(
        ConflictError, match=r"has moved since version 2: it is canary 0\.05 \(version 3, by ann: first\)"
    ):
        stages.roll_back(stages.find("chat", ""), saw.version, "bob", "second")
    assert stages.find("chat", "").share == 0.05


def test_who_follows_first_sets_the_rules_and_others_change_them_only_where_they_may() -> None:
    stages, _ = opened()
    before, loose = stages.find("chat", ""), RULES.model_copy(update={"trial_requests": 1})
    stages.follow([followed("chat", loose), followed("new", loose)], sets_rules=False)
    assert stages.find("chat", "") is before and stages.find("new", "").rules == loose
    stages.follow([followed("chat", loose)])
    assert stages.find("chat", "").rules == loose


def test_a_route_that_anybody_may_invent_holds_no_training() -> None:
    stages = Stages(lambda _: None)
    stages.begin_run("run")
    for number in range(10):
        stages.serves(number)
        stages.follow([followed("invented")], sets_rules=False, may_hold=False)
        assert not stages.holds
    # whoever may say so gives it trials
    stages.follow([followed("invented")])
    stages.serves(20)
    assert stages.holds


def test_an_incumbent_that_somebody_else_followed_first_is_known_as_a_version_once_its_own_gateway_does() -> None:
    stages = Stages(lambda _: None)
    stages.begin_run("run")
    stages.serves(20)
    second = [followed("chat", incumbent="tiny, version 20", version=20)]
    stages.follow(second, sets_rules=False, may_hold=False)
    assert not stages.held and not stages.holds
    stages.follow(second)
    stage = stages.find("chat", "")
    assert (stage.incumbent_version, stages.held) == (20, {20: "the incumbent on chat"})
    assert not stages.holds, "it is not compared with itself"
    stages.serves(21)
    assert not stages.holds
    stages.serves(22)
    assert stages.holds
    assert stages.recall(stages.find("chat", ""), None, "ann", "worse").recalled


def test_a_repeated_move_changes_nothing() -> None:
    stages, _ = opened()
    saw = stages.find("chat", "gpt")
    with pytest.raises(ConflictError, match="chat has no challenger yet"):
        stages.promote(saw, saw.version, "ann", "up")
    stages.serves(0)
    saw = stages.find("chat", "gpt")
    with pytest.raises(RequestError, match="say the share, or the version"):
        stages.promote(saw, None, "ann", "up")
    once = stages.promote(saw, saw.version, "ann", "up", share=0.05)
    assert stages.promote(once, saw.version, "ann", "up", share=0.05) is once
    # also where the share follows from the version
    assert stages.promote(once, saw.version, "ann", "up") is once
    with pytest.raises(ConflictError, match="has moved since"):
        stages.promote(once, saw.version, "bob", "up", share=0.05)
    held = stages.pin(once, once.version, "ann", "hold", pinned=True)
    assert stages.pin(held, once.version, "ann", "hold", pinned=True) is held
    back = stages.roll_back(held, held.version, "ann", "down")
    assert stages.roll_back(back, held.version, "ann", "down") is back


@pytest.mark.anyio
async def test_weights_that_come_again_are_others_also_after_a_restart(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    controller = rolling(journal)
    pool = controller.pool
    pool.advance(10)
    for number, version in enumerate((4, 10, 10)):
        await controller.episodes.record_pair(pair(f"g{number}", challenger=version))
    pool.advance(4)
    assert [one.challenger for one in pool.comparisons.statuses()] == [4]
    pool.advance(10)
    await controller.episodes.record_pair(pair("late", challenger=10))
    await journal.close()
    journal = Journal.open(tmp_path / "journal.db")
    again = Controller(CONFIG)
    again.open(journal)
    [found] = again.pool.comparisons.statuses()
    assert (found.challenger, found.verdict.requests) == (10, 1)
    await journal.close()


@pytest.mark.anyio
async def test_what_is_late_of_weights_that_are_lost_with_the_server_is_none_of_those_that_come_again(
    tmp_path: Path,
) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    controller = rolling(journal)
    done = (StepResult(step=step, batch_id=f"b{step}", metrics={}, seconds=1.0) for step in (9, 10))
    journal.append(*(StepRow(controller.run.run_id, step) for step in done))
    await journal.close()
    journal = Journal.open(tmp_path / "journal.db")
    again = Controller(CONFIG)
    again.open(journal)
    # its engine goes on from an earlier checkpoint
    again.pool.advance(4)
    for version in (4, 10):
        await again.episodes.record_pair(pair(f"of {version}", challenger=version))
    assert [one.challenger for one in again.pool.comparisons.statuses()] == [4]
    await journal.close()


@pytest.mark.anyio
async def test_the_journal_keeps_the_moves_and_the_newest_row_of_each_pointer(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    controller = rolling(journal)
    stages = controller.pool.stages
    stages.follow(ROUTES)
    for version in range(5):
        stages.serves(version)
    chat = stages.find("chat", "")
    stages.promote(chat, chat.version, "ann", "read 50")
    for pinned in (True, False):
        stages.pin(stages.find("chat", ""), None, "bob", "demo", pinned=pinned)
    for version in range(5, 9):
        stages.serves(version)
        await controller.episodes.synced()
    await journal.close()
    with sqlite3.connect(tmp_path / "journal.db") as connection:
        rows = [json.loads(row) for (row,) in connection.execute("SELECT stage FROM stages ORDER BY route, version")]
    assert [(row["route"], row["challenger"], row["share"], row["pinned"]) for row in rows] == [
        ("chat", 0, 0.0, False),
        ("chat", 4, 0.05, False),
        ("chat", 4, 0.05, True),
        ("chat", 5, 0.0, False),
        ("chat", 8, 0.0, False),
        ("code", 0, 0.05, False),
        ("code", 8, 0.05, False),
    ]
    assert rows[1]["why"] == "read 50"


def test_what_is_proven_live_is_held_too_where_weights_went_on_since_the_promotion() -> None:
    stages = Stages(lambda _: None)
    comparisons = Comparisons(lambda _: None, on_evidence=stages.judged)
    stages.follow([followed("chat", StageRules())])
    stages.serves(20)
    stages.promote(stages.find("chat", ""), None, "ann", "good", share=1.0)
    stages.serves(25)
    for number in range(60):
        comparisons.add(pair(f"g{number}", 0.9, 0.1, challenger=25, stage="live", share=1.0))
    assert stages.find("chat", "").successor == 25
    # its checkpoint is about to be written as the next incumbent
    assert stages.held == {20: "promoted on chat", 25: "promoted on chat"}


def test_what_was_promoted_or_pinned_is_held_until_it_is_taken_back() -> None:
    stages = Stages(lambda _: None)
    stages.follow([followed("chat", StageRules())])
    chat = "chat", ""
    stages.serves(4)
    stages.promote(stages.find(*chat), None, "ann", "good", share=0.5)
    # training goes on meanwhile
    stages.serves(5)
    stages.pin(stages.find(*chat), None, "ann", "demo", pinned=True)
    stages.serves(6)
    assert stages.held == {4: "promoted on chat", 5: "pinned on chat"}
    stages.roll_back(stages.find(*chat), None, "ann", "6 is bad")
    assert stages.held == {4: "promoted on chat", 5: "pinned on chat"}, "4 can be taken back to"
    stages.pin(stages.find(*chat), None, "ann", "over", pinned=False)
    stages.promote(stages.find(*chat), None, "ann", "good", share=0.5)
    assert stages.held == {6: "promoted on chat"}
    stages.begin_run("went back to 6", 6)
    assert stages.held == {6: "promoted on chat"}
    stages.serves(5)
    assert stages.held == {}, "what comes again as 6 is other weights"
    stages.serves(7)
    stages.promote(stages.find(*chat), None, "ann", "good", share=1.0)
    stages.roll_back(stages.find(*chat), None, "ann", "7 is bad")
    assert stages.held == {}


def test_the_next_incumbent_begins_a_comparison_and_that_of_the_one_before_it_is_left() -> None:
    now = 0.0
    stages, rows = opened(clock=lambda: now)
    stages.serves(2)
    stages.promote(stages.find("chat", "gpt"), None, "ann", "good", share=1.0)
    stages.follow([followed("chat", incumbent="tiny, version 2", version=2)])
    assert not stages.find("chat", "tiny, version 2").trial, "a version is not compared with itself"
    with pytest.raises(RequestError, match="say which route, and which incumbent"):
        stages.find("", "")
    with pytest.raises(RequestError, match="chat before gpt; chat before tiny, version 2"):
        stages.find("chat", "")  # the challenger before gpt answers users
    stages.roll_back(stages.find("chat", "gpt"), None, "ann", "bad")
    assert stages.find("chat", "").incumbent == "tiny, version 2", "also while the one before is listed"
    stages.promote(stages.find("chat", "gpt"), None, "ann", "good", share=1.0)
    now = FOLLOWED_SECONDS
    stages.follow([followed("chat", incumbent="tiny, version 2", version=2)])
    assert not stages.holds and [stage.key for stage in stages.current] == [
        ("code", "gpt"),
        ("chat", "tiny, version 2"),
    ]
    left = stages.find("chat", "gpt")
    stages.serves(3)
    assert stages.find("chat", "gpt") is left and not stages.holds
    stages.serves(4)
    again = stages.find("chat", "")
    assert (again.incumbent, again.challenger, again.trial) == ("tiny, version 2", 4, True)
    stages.promote(again, None, "ann", "good", share=1.0)
    assert stages.held == {2: "the incumbent on chat", 4: "promoted on chat"}
    now += FOLLOWED_SECONDS
    stages.follow([followed("chat", incumbent="tiny, version 4", version=4)])
    stages.serves(6)
    stages.promote(stages.find("chat", "tiny, version 4"), None, "ann", "good", share=1.0)
    assert stages.held == {4: "the incumbent on chat", 6: "promoted on chat"}, "of 2 nothing is left to go back to"
    # who follows the first one again sees what is served
    stages.follow([followed("chat")])
    first = stages.find("chat", "gpt")
    assert (first.challenger, first.share, first.why) == (6, 0.0, "version 2 became the incumbent")
    assert restored(rows).pointers == stages.pointers


def test_a_run_that_goes_back_to_its_incumbent_trains_on() -> None:
    stages, _ = opened()
    stages.serves(2)
    stages.promote(stages.find("chat", "gpt"), None, "ann", "good", share=1.0)
    stages.begin_run("another start")
    stages.follow([followed("chat", incumbent="tiny, version 2", version=2)])
    stages.serves(3)
    stages.begin_run("went back", 2)
    stages.serves(2)
    again = stages.find("chat", "tiny, version 2")
    assert (again.challenger, again.trial) == (2, False), "a version is not compared with itself"
    stages.serves(4)
    assert stages.find("chat", "tiny, version 2").trial


def test_training_waits_for_no_challenger_that_is_the_incumbent_of_other_gateways() -> None:
    stages, rows = opened()
    rules = RULES.model_copy(update={"mode": "manual"})
    elsewhere, next_one = followed("chat", rules), followed("chat", rules, "tiny, version 2", 2)
    stages.follow([elsewhere])
    stages.serves(2)
    stages.promote(stages.find("chat", "gpt"), None, "ann", "good", share=1.0)
    stages.roll_back(stages.find("code", "gpt"), None, "ann", "not of this test")
    assert stages.holds, "what was proven is what answers"
    stages.follow([next_one])
    stages.follow([elsewhere])
    assert not stages.holds
    assert stages.find("chat", "gpt").share == 1, "the same weights as before"
    stages.serves(3)
    left = stages.find("chat", "gpt")
    assert (left.share, left.by) == (0.0, SERVER) and "version 2 is the incumbent of other gateways" in left.why
    assert stages.held == {2: "the incumbent on chat"} and not stages.holds
    assert restored(rows).pointers == stages.pointers


def test_training_waits_after_a_rollback_until_a_person_lets_it_go_on() -> None:
    stages, rows = opened()
    pausing = RULES.model_copy(update={"after_rollback": "pause"})
    stages.follow([followed("chat", pausing)])
    stages.serves(1)
    stages.promote(stages.find("chat", "gpt"), None, "ann", "good", share=0.25)
    assert stages.holds
    stages.roll_back(stages.find("chat", "gpt"), None, "ann", "bad")
    assert stages.holds and not stages.find("chat", "gpt").trial
    # a second one lets it go on no sooner
    stages.roll_back(stages.find("chat", "gpt"), None, "bob", "bad indeed")
    again = restored(rows)
    assert again.holds
    again.resume()
    assert not again.holds and again.find("chat", "gpt").share == 0
    # nobody took a challenger back whose weights are gone
    again.serves(2)
    again.promote(again.find("chat", "gpt"), None, "ann", "good", share=0.25)
    again.begin_run("another")
    assert again.find("chat", "gpt").share == 0 and not again.holds


def test_what_a_token_that_may_not_hold_follows_neither_takes_back_nor_pauses() -> None:
    stages, _ = opened()
    stages.serves(2)
    stages.promote(stages.find("chat", "gpt"), None, "ann", "good", share=1.0)
    pausing = RULES.model_copy(update={"begins": "canary", "after_rollback": "pause"})
    stages.follow([followed("chat", pausing, "tiny, version 2", 2)], sets_rules=False, may_hold=False)
    begun = stages.find("chat", "tiny, version 2")
    assert (begun.incumbent_version, begun.rules.trial_every, begun.rules.after_rollback) == (0, None, "train")
    assert stages.holds
    stages.serves(2)
    assert stages.find("chat", "gpt").share == 1


def test_training_waits_while_a_canary_is_pinned_and_no_longer_than_its_trial_afterwards() -> None:
    now = [0.0]
    stages = Stages(lambda _: None, lambda: now[0], lambda: now[0])
    canary = RULES.model_copy(update={"begins": "canary", "trial_hours": 1.0})

    def holds_at(hours: float) -> bool:
        now[0] = hours * 3600
        stages.follow([followed("chat", canary)])
        return stages.holds

    assert not holds_at(0)
    stages.serves(2)
    assert holds_at(0.5)
    stages.pin(stages.find("chat", ""), None, "ann", "demo", pinned=True)
    assert holds_at(5)
    stages.pin(stages.find("chat", ""), None, "ann", "over", pinned=False)
    assert holds_at(5.9) and not holds_at(6)


def test_a_pinned_challenger_keeps_its_weights_also_where_it_is_an_incumbent_elsewhere() -> None:
    stages, _ = opened()
    stages.follow([followed("chat"), followed("chat", incumbent="tiny, version 2", version=2)])
    stages.serves(2)
    stages.roll_back(stages.find("code", "gpt"), None, "ann", "not of this test")
    stages.promote(stages.find("chat", "gpt"), None, "ann", "good", share=1.0)
    assert not stages.holds
    stages.pin(stages.find("chat", "gpt"), None, "ann", "demo", pinned=True)
    assert stages.holds


def test_few_checkpoints_are_held_however_often_an_incumbent_is_succeeded() -> None:
    now = 0.0
    stages, _ = opened(clock=lambda: now)
    canary = ROUTES[1].rules
    name, version = "gpt", 0
    for step in range(10, 60, 10):
        stages.follow([followed("chat", canary, name, version)])
        stages.serves(step)
        stages.promote(stages.find("chat", name), None, "ann", "good", share=1.0)
        now += FOLLOWED_SECONDS
        name, version = f"tiny, version {step}", step
        stages.follow([followed("chat", canary, name, version)])
        assert set(stages.held) <= {step, step - 10}, stages.held


def test_an_incumbent_is_succeeded_however_many_there_were_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.server.episodes.stages.MAX_STAGES", 6)
    now = 0.0
    stages, _ = opened(clock=lambda: now)
    for version in range(1, 20):
        stages.follow([ROUTES[1], followed("chat", incumbent=f"tiny {version}", version=version)])
        stages.serves(version)
        stages.copies = dict(stages.pointers)
        if version == 3:
            stages.pin(stages.find("chat", "tiny 3"), None, "ann", "demo", pinned=True)
        now += FOLLOWED_SECONDS
    assert [stage.incumbent for stage in stages.pointers.values()] == [
        "gpt",
        "gpt",
        "tiny 3",
        *(f"tiny {version}" for version in (17, 18, 19)),
    ]
    assert stages.taken_back() == []
    # nobody's place is taken who is followed, or by whoever invents routes
    now -= FOLLOWED_SECONDS
    stages.follow([followed("chat", incumbent=f"tiny {version}", version=version) for version in (17, 18)])
    with pytest.raises(RequestError, match="has the stages of 6 routes already"):
        stages.follow([followed("invented")])


def test_an_incumbent_that_is_recalled_answers_no_more_and_neither_does_a_challenger() -> None:
    now = 0.0
    stages, rows = opened(clock=lambda: now)
    with pytest.raises(ConflictError, match="gpt is the incumbent of the gateway's file"):
        stages.recall(stages.find("chat", "gpt"), None, "ann", "bad")
    stages.serves(2)
    stages.promote(stages.find("chat", "gpt"), None, "ann", "good", share=1.0)
    stages.follow([followed("chat", incumbent="tiny, version 2", version=2)])
    stages.serves(4)
    stages.promote(stages.find("chat", "tiny, version 2"), None, "ann", "good", share=1.0)
    with pytest.raises(ConflictError, match="has moved since version 1"):
        stages.recall(stages.find("chat", "tiny, version 2"), 1, "ann", "bad")
    recalled = stages.recall(stages.find("chat", "tiny, version 2"), None, "ann", "both are bad")
    assert (recalled.recalled, recalled.share, recalled.why) == (True, 0.0, "both are bad")
    assert stages.find("chat", "gpt").share == 0 and not recalled.trial
    assert stages.recall(recalled, None, "ann", "both are bad") is recalled
    assert restored(rows).pointers == stages.pointers
    # also after a minute in which no gateway followed
    now = FOLLOWED_SECONDS
    stages.follow([followed("chat", incumbent="tiny, version 2", version=2)])
    assert stages.find("chat", "tiny, version 2").recalled


@pytest.mark.anyio
async def test_a_run_that_goes_on_with_another_job_holds_what_was_promoted_or_pinned(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    controller = rolling(journal)
    pool, job = controller.pool, controller.job
    pool.stages.follow([followed("chat", StageRules())])
    pool.advance(4)
    pool.stages.promote(pool.stages.find("chat", ""), None, "ann", "good", share=0.5)
    pool.advance(6)
    pool.stages.pin(pool.stages.find("chat", ""), None, "ann", "demo", pinned=True)
    controller.offline("stopped")
    controller.sync_job(job.model_copy(update={"lr": 0.5, "resume": True}))
    assert pool.stages.held == {4: "promoted on chat", 6: "pinned on chat"}
    pool.advance(5)
    assert pool.stages.held == {4: "promoted on chat"}, "what comes again as 6 is other weights"
    controller.sync_job(job.model_copy(update={"lr": 0.25}))
    assert pool.stages.held == {}
    await journal.close()


@pytest.mark.anyio
async def test_the_trainer_is_told_what_is_held(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    controller = rolling(journal)
    stages, folder = controller.pool.stages, tmp_path / "checkpoints"
    stages.follow(ROUTES)
    stages.serves(2)
    chat = stages.find("chat", "")
    stages.promote(chat, chat.version, "ann", "good")
    telling = HeldPolicies(controller.run, tmp_path)
    await telling.tell()
    assert held_steps(folder) == {2: "promoted on chat"}
    stages.roll_back(stages.find("chat", ""), None, "ann", "bad")
    await telling.tell()
    assert held_steps(folder) == {}
    # a disk that refuses it is tried each second, for days perhaps, and told once
    shutil.rmtree(folder)
    folder.write_text("no folder")
    stages.promote(stages.find("chat", ""), None, "ann", "good", share=0.5)
    assert [await telling.tell() for _ in range(3)] == [False] * 3
    assert caplog.text.count("cannot say in") == 1
    folder.unlink()
    assert await telling.tell() and held_steps(folder) == {2: "promoted on chat"}
    await journal.close()


def test_a_trial_that_nobody_decides_ends_by_the_clock() -> None:
    wall = 0.0
    stages, _ = opened(clock=lambda: 0.0, wall=lambda: wall)
    stages.serves(2)
    assert stages.holds
    wall = 3600.0
    assert not stages.holds and not stages.find("chat", "").trial


def test_the_last_version_has_a_trial_too() -> None:
    stages, _ = opened()
    stages.job = JobTerms(last_version=5)
    trials: list[int] = []
    for version in range(7):
        stages.serves(version)
        if stages.find("chat", "").trial:
            trials.append(version)
            stages.roll_back(stages.find("chat", ""), None, "ann", f"no better: {version}")
    assert trials == [2, 4, 5]


def test_training_waits_for_a_trial_that_somebody_follows() -> None:
    now = 0.0
    stages, _ = opened(clock=lambda: now)
    stages.serves(1)
    assert not stages.holds
    stages.serves(2)
    assert stages.holds and stages.next_lapse() == FOLLOWED_SECONDS
    now = FOLLOWED_SECONDS
    assert not stages.holds
    stages.follow(ROUTES[:1])
    assert stages.holds


@pytest.mark.anyio
async def test_a_batch_waits_for_the_verdict_and_groups_are_judged_untrained(tmp_path: Path) -> None:
    from swarm.protocol import TRAINING_WAITS
    from swarm.server.episodes.episode import ClaimWish, Refusal
    from tests.swarm.server.episodes.test_pool import ends, sample
    from tests.swarm.server.test_recovery import granted

    journal = Journal.open(tmp_path / "journal.db")
    controller = rolling(journal)
    pool = controller.pool
    await controller.episodes.follow_stages([followed("chat")], None, 0.0)
    pool.stages.serves(2)
    trainer = asyncio.create_task(controller.next_batch())
    for _ in range(2):
        grant = await granted(controller, ClaimWish("me", episodes=2, as_group=True, max_seconds=1000.0))
        for one in grant.claims:
            sample(pool, one)
        await controller.episodes.end("me", str(grant.group_uuid), ends(*grant.claims), as_group=True)
    refused = pool.claim(ClaimWish("me", episodes=2, as_group=True, max_seconds=1000.0))
    assert isinstance(refused, Refusal) and refused.reason == TRAINING_WAITS
    assert not trainer.done()
    for number in range(RULES.trial_requests):
        await controller.episodes.record_pair(pair(f"g{number}", ours=0.1, theirs=0.9, challenger=2, model="tiny"))
    await asyncio.wait_for(trainer, 10)
    assert not pool.stages.holds
    await journal.close()

    journal = Journal.open(tmp_path / "journal.db")
    again = Controller(CONFIG)
    again.open(journal)
    assert again.pool.stages.pointers == pool.stages.pointers
    await journal.close()


@pytest.mark.anyio
async def test_a_person_moves_it_over_the_wire_and_followers_are_told(rig: server.Rig) -> None:
    rules = {"trial_every": None, "mode": "manual"}
    asked = {"client_uuid": "gateway", "routes": [{"route": "chat", "incumbent": "gpt", "rules": rules}]}
    first = await rig.post("/follow_stages", **asked)
    [stage] = first["stages"]
    assert (stage["stage"], stage["share"], stage["version"]) == ("shadow", 0, 2)
    waiting = asyncio.create_task(
        rig.client.post("/follow_stages", json={**asked, "after_change": first["changes"], "wait_seconds": 30})
    )
    refused = await rig.client.post("/policies/promote", json={"reason": "?", "version": 7})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "stage_moved")
    done = await rig.client.post("/policies/promote?sender=ann", json={"reason": "looks good", "version": 2})
    assert (done.json()["stage"]["share"], done.json()["stage"]["why"]) == (0.05, "looks good")
    told = (await asyncio.wait_for(waiting, 10)).json()
    [followed] = told["stages"]
    # who may only read cannot find the side of a conversation
    assert followed["salt"] and followed | {"salt": ""} == done.json()["stage"] and told["changes"] > first["changes"]
    assert (await rig.client.get("/status")).json()["stages"] == [done.json()["stage"]]
    repeated = await rig.client.post("/policies/promote?sender=ann", json={"reason": "looks good", "share": 0.05})
    assert (repeated.status_code, repeated.json()["stage"]) == (200, done.json()["stage"])
    # whose rules they are says the configuration that began them
    other = [{**asked["routes"][0], "rules": {"trial_every": None, "mode": "never"}}]
    goes_on = await rig.post("/follow_stages", **asked | {"routes": other}, after_change=0)
    assert goes_on["stages"][0]["rules"]["mode"] == "manual"
    for what, body in (("pin", {"pinned": True}), ("rollback", {})):
        response = await rig.client.post(f"/policies/{what}", json={"reason": "enough", **body})
        assert response.status_code == 200, response.text
    [policy] = (await rig.client.get("/policies")).json()["policies"]
    assert (policy["stage"]["rolled_back"], policy["stage"]["pinned"], policy["verdict"]) == (True, True, None)
    explained = (await rig.client.get("/policies/explain", params={"of": "chat"})).json()["lines"]
    assert explained[1].endswith("by anonymous: enough") or "enough" in explained[1]
    [stage] = (await rig.client.get("/status")).json()["stages"]
    drawn = pair("draw", challenger=stage["challenger"], suites=("sums@1",)).model_copy(update={"suite": "sums@1"})
    await rig.post("/record_pair", client_uuid="me", pair=drawn.model_dump())
    explained = (await rig.client.get("/policies/explain", params={"of": "chat"})).json()["lines"]
    assert "suite sums@1: undecided in 1 draws, 0 of them not judged" in explained
    live = pair("live", challenger=stage["challenger"], suites=("sums@1",))
    longer, shorter = (
        side.model_copy(update={"characters": characters})
        for side, characters in ((live.challenger, 300), (live.incumbent, 200))
    )
    told = live.model_copy(update={"challenger": longer, "incumbent": shorter})
    await rig.post("/record_pair", client_uuid="me", pair=told.model_dump())
    explained = (await rig.client.get("/policies/explain", params={"of": "chat"})).json()["lines"]
    guards = "guards: errors +0.000 (at most 0.02), refusals +0.000 (at most 0.05), length 1.50 times the incumbent's"
    assert f"{guards} (at most 2)" in explained, explained
    missing = await rig.client.get("/policies/explain", params={"of": "no"})
    assert missing.status_code == 404
    assert (await rig.client.post("/policies/promote", json={"reason": ""})).status_code in (400, 422)


@pytest.mark.anyio
async def test_nobody_follows_a_move_before_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = rolling(Journal.open(tmp_path / "journal.db"))
    first, _ = await controller.episodes.follow_stages([followed("chat")], None, 0.0)
    await controller.episodes.synced()
    asked, written = asyncio.Event(), asyncio.Event()

    async def synced() -> None:
        asked.set()
        await written.wait()

    monkeypatch.setattr(controller.episodes, "synced", synced)
    following = asyncio.create_task(controller.episodes.follow_stages([followed("chat")], first, 10.0))
    stages = controller.pool.stages
    seen = stages.find("chat", "")
    stages.promote(seen, seen.version, "ann", "up")
    await asyncio.wait_for(asked.wait(), 10)
    assert not following.done()
    written.set()
    changes, [stage] = await asyncio.wait_for(following, 10)
    assert changes > first and stage.share > 0


@pytest.mark.anyio
async def test_a_rollback_is_followed_before_it_is_on_disk_and_nothing_with_it_that_a_death_undoes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = rolling(Journal.open(tmp_path / "journal.db"))
    episodes, stages = controller.episodes, controller.pool.stages
    await episodes.follow_stages([followed("chat"), followed("code")], None, 0.0)
    await episodes.move_stage(lambda stages: stages.promote(stages.find("chat", ""), None, "ann", "up", share=0.25))
    told = stages.changes

    async def full() -> None:
        raise UnavailableError("the disk is full", code="journal_unavailable")

    monkeypatch.setattr(episodes, "synced", full)
    stages.roll_back(stages.find("chat", ""), None, "ann", "worse")
    changes, now = await episodes.follow_stages([followed("chat"), followed("code")], told, 10.0)
    assert {stage.route: stage.share for stage in now} == {"chat": 0.0, "code": 0.0}
    stages.promote(stages.find("code", ""), None, "ann", "up", share=0.25)
    stages.roll_back(stages.find("code", ""), None, "ann", "worse")
    with pytest.raises(UnavailableError):
        await episodes.follow_stages([followed("chat"), followed("code")], changes, 10.0)


@pytest.mark.anyio
async def test_a_rollback_is_followed_although_what_came_before_it_is_not_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = rolling(Journal.open(tmp_path / "journal.db"))
    episodes, stages = controller.episodes, controller.pool.stages
    rules = StageRules(begins="canary")
    routes = [followed("chat", rules), followed("code", rules)]
    told, before = await episodes.follow_stages(routes, None, 0.0)

    async def full() -> None:
        raise UnavailableError("the disk is full", code="journal_unavailable")

    monkeypatch.setattr(episodes, "synced", full)
    # the checkpoint of these weights has filled the disk
    stages.serves(20)
    with pytest.raises(UnavailableError):
        await episodes.follow_stages(routes, told, 10.0)
    stages.roll_back(stages.find("chat", ""), None, "ann", "worse")
    changes, [chat, code] = await episodes.follow_stages(routes, told, 10.0)
    assert (chat.route, chat.share) == ("chat", 0.0) and code == before[1] and changes != stages.changes
    monkeypatch.undo()
    changes, now = await episodes.follow_stages(routes, changes, 10.0)
    assert (changes, now) == (stages.changes, list(stages.pointers.values()))


@pytest.mark.anyio
async def test_a_copy_of_the_journal_at_any_moment_of_a_move_has_the_stage_before_or_after(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    controller = rolling(journal)
    await controller.episodes.follow_stages([followed("chat")], None, 0.0)
    await controller.episodes.synced()
    stages = controller.pool.stages
    for number in range(20):
        before = stages.find("chat", "")

        def move(stages: Stages, seen: ServingStage = before) -> ServingStage:
            if seen.share < 1:
                return stages.promote(seen, seen.version, "ann", "up")
            return stages.roll_back(seen, seen.version, "ann", "down")

        moving = asyncio.create_task(controller.episodes.move_stage(move))
        # another moment of the writer's each time
        for _ in range(number % 5):
            await asyncio.sleep(0)
        path = tmp_path / f"copy{number}" / "journal.db"
        path.parent.mkdir()
        # by SQLite, for an idle writer may empty the log between the copies of two files
        with closing(sqlite3.connect(tmp_path / "journal.db")) as living, closing(sqlite3.connect(path)) as copy:
            living.backup(copy)
        after = await moving
        killed = Journal.open(path)
        [row] = killed.recover().stages
        assert ServingStage.model_validate_json(row.stage) in (before, after)
        await killed.close()
    await journal.close()


@pytest.mark.anyio
async def test_what_another_hook_judged_asks_nobody_to_promote(rig: server.Rig) -> None:
    rules = StageRules(trial_every=1, hook="hooks", code="of the stage")
    rig.controller.pool.stages.follow([followed("chat", rules)])
    rig.controller.pool.advance(1)

    numbers = itertools.count()

    async def judged(code: str, ours: float, theirs: float) -> dict[str, Any]:
        for _ in range(60):
            one = pair(f"{code} {next(numbers)}", ours, theirs, hook="hooks", code=code, model="tiny")
            await rig.post("/record_pair", client_uuid="me", pair=one.model_dump())
        return (await rig.client.get("/policies/explain")).json()

    # a gateway that was not updated, say
    policy = await judged("another", 0.9, 0.1)
    assert (policy["verdict"]["promotable"], policy["waits"]) == (True, "")
    assert policy["lines"][-1].endswith("this verdict moves nothing")
    await judged("of the stage", 0.1, 0.9)
    policy = await judged("another", 0.9, 0.1)
    assert (policy["verdict"]["finding"], policy["waits"]) == ("worse", "")
    # gateways ask their suites by what this says
    [status] = (await rig.client.get("/status")).json()["comparisons"]
    assert status["verdict"] == policy["verdict"]
