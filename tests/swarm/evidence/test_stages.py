"""The stage machine: who moves a share, when, and what a new version begins."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.evidence.pairs import GateRules, Pair, SideResult, Terms
from swarm.evidence.stages import SERVER, VERDICT, JobTerms, ServingStage, StageRules
from swarm.evidence.verdict import PairedEvidence

AUTO = StageRules(mode="auto", trial_every=5, trial_requests=400)


def begun(rules: StageRules = AUTO, version: int | None = 5) -> ServingStage:
    stage = ServingStage.begun("chat", "gpt", rules, 1.0, "salt")
    return stage if version is None else stage.serving(version, 2.0)


def evidence(stage: ServingStage, *differences: float | None, **more: Any) -> PairedEvidence:
    """As many pairs of the stage's challenger as there are differences; ``None``: nobody judged it."""
    share = stage.share if 0 < stage.share < 1 else 0.0
    terms: dict[str, Any] = {"challenger": stage.challenger, "stage": stage.label, "share": share, "rules": GateRules()}
    terms_of = Terms(route="chat", incumbent="gpt", **terms | more)
    pairs = [
        Pair(
            group_id=f"g{number}",
            terms=terms_of,
            challenger=SideResult(reward=None if difference is None else 0.5 + difference / 2),
            incumbent=SideResult(reward=0.5 - (difference or 0) / 2),
        )
        for number, difference in enumerate(differences)
    ]
    evidence = PairedEvidence(terms_of)
    for pair in pairs:
        evidence.add(pair)
    return evidence


BETTER, WORSE, EQUAL = [0.3] * 60, [-0.3] * 60, [0.4, -0.4] * 30


def test_a_proven_challenger_goes_through_each_share_to_live_and_each_needs_evidence_of_its_own() -> None:
    stage = begun()
    labels: list[str] = []
    while stage.share < 1:
        shadow = evidence(begun(), *BETTER)
        labels.append(stage.label)
        assert stage.trial
        moved = stage.judged(evidence(stage, *BETTER), 3.0)
        # of another stage or another version it proves nothing
        assert moved.judged(shadow, 3.0) is moved
        assert moved.judged(evidence(moved, *BETTER, challenger=4), 3.0) is moved
        assert (moved.before, moved.version, moved.by) == (stage.share, stage.version + 1, VERDICT)
        assert moved.why.startswith("better by 0.30 [")
        stage = moved
    assert labels == ["shadow", "canary 0.05", "canary 0.25"] and stage.label == "live"
    # training waits while it answers users; what is proven live may be the next incumbent, and no share moves
    assert stage.successor is None
    proven = stage.judged(evidence(stage, *BETTER), 4.0)
    assert (proven.successor, proven.share, proven.trial) == (5, 1, True)
    assert proven.judged(evidence(stage, *BETTER), 4.0) is proven
    back = proven.judged(evidence(stage, *WORSE), 5.0)
    assert back.successor is None
    assert (back.share, back.before, back.trial, back.rolled_back, back.by) == (0, 1, False, True, VERDICT)
    assert back.why.startswith("worse by 0.30")


def test_a_trial_begins_every_so_many_steps_and_ends_with_what_is_proven_or_used_up() -> None:
    assert not begun(version=4).trial
    stage = begun(version=4).serving(7, 3.0)
    assert (stage.trial, stage.tried) == (True, 7)
    for differences, why in ((WORSE, "worse by 0.30"), ([0.4, -0.4] * 200, "no proof"), ([None] * 400, "no proof")):
        over = stage.judged(evidence(stage, *differences), 4.0)
        assert (over.trial, over.share, over.tried) == (False, 0, 7) and over.ended.startswith(why)
        # what further pairs make of it changes nothing
        assert over.judged(evidence(stage, *differences, *BETTER), 4.0).ended == over.ended
        for version, trial, ended in ((11, False, over.ended), (12, True, "")):
            served = over.serving(version, 5.0)
            assert (served.trial, served.ended) == (trial, ended)
    assert stage.judged(evidence(stage, *EQUAL), 4.0) is stage
    # a dead judge promotes nobody
    assert stage.judged(evidence(stage, *BETTER, *[None] * 10), 4.0) is stage


def test_a_canary_without_proof_is_taken_back() -> None:
    stage = begun().moved(0.05, 3.0, VERDICT, "better")
    assert stage.judged(evidence(stage, *EQUAL), 4.0) is stage
    back = stage.judged(evidence(stage, *[0.4, -0.4] * 200), 4.0)
    assert (back.share, back.trial) == (0, False) and back.why.startswith("no proof in 400 requests: not decided")


def test_a_rollback_pauses_training_until_a_person_moves_the_share_or_goes_on() -> None:
    stage = begun(AUTO.model_copy(update={"after_rollback": "pause"}))
    canary = stage.moved(0.05, 3.0, VERDICT, "better")
    back = canary.moved(0.0, 4.0, VERDICT, "worse")
    assert (stage.moved(0.0, 3.0, "ann", "nothing to take back").paused, canary.paused, back.paused) == (
        False,
        False,
        True,
    )
    assert not canary.moved(0.0, 4.0, SERVER, "other weights").paused
    assert back.moved(0.0, 5.0, "ann", "once more").paused and not back.moved(0.05, 5.0, "ann", "look").paused
    assert not back.resumed().paused and canary.resumed() is canary


@pytest.mark.parametrize("mode", ["manual", "never"])
def test_only_auto_moves_by_itself(mode: Any) -> None:
    stage = begun(AUTO.model_copy(update={"mode": mode}))
    proven = stage.judged(evidence(stage, *BETTER), 3.0)
    # a person is asked, and the weights stay what was judged; where nobody is promoted training goes on
    assert (proven.share, proven.trial) == (0, mode == "manual")
    served = stage.moved(0.05, 3.0, "ann", "why not")
    # a person takes it back, and training does not wait for him
    for differences in (WORSE, [0.4, -0.4] * 200):
        over = served.judged(evidence(served, *differences), 4.0)
        assert (over.share, over.trial) == (0.05, False)
    assert served.serving(9, 5.0).share == 0.05


def test_a_pinned_stage_is_moved_by_no_verdict_and_no_version() -> None:
    stage = begun().moved(0.05, 3.0, "ann", "look").set_pinned(True, "bob", "hold", 3.0)
    assert (stage.at, stage.by, stage.why, stage.pinned_by, stage.pinned_why) == (3.0, "ann", "look", "bob", "hold")
    assert stage.judged(evidence(stage, *WORSE), 4.0) is stage
    assert stage.serving(6, 4.0).share == stage.begun_again(4.0, "another run").share == 0.05
    free = stage.set_pinned(False, "ann", "go on", 4.0)
    assert free.judged(evidence(free, *WORSE), 6.0).share == 0


@pytest.mark.parametrize(("begins", "share"), [("shadow", 0.0), ("canary", 0.05), ("live", 1.0)])
def test_other_weights_go_back_to_where_the_configuration_says_and_never_up(begins: Any, share: float) -> None:
    stage = begun(AUTO.model_copy(update={"begins": begins}))
    assert (stage.share, stage.by) == (share, "the configuration")
    lower, moved = min(share, 0.25), stage.moved(0.25, 3.0, VERDICT, "better")
    # an engine that died went on from an earlier checkpoint
    other = moved.serving(3, 4.0)
    assert (other.share, other.challenger) == (lower, 3)
    if lower < 0.25:
        assert (other.by, other.why) == (SERVER, "version 3 begins a new comparison")
    again = moved.begun_again(5.0, "another training run began")
    assert (again.share, again.challenger, again.trial, again.tried) == (lower, None, False, 0)
    assert again.version == moved.version + 1


@pytest.mark.parametrize("begins", ["canary", "live"])
def test_after_a_rollback_only_a_proof_or_a_person_moves_it_up(begins: Any) -> None:
    stage = begun(AUTO.model_copy(update={"begins": begins})).moved(0.0, 3.0, "ann", "users complain")
    twice = stage.moved(0.0, 4.0, "ann", "still")
    assert stage.rolled_back and twice.rolled_back and twice.before == stage.before
    for other in (twice.serving(6, 5.0), twice.serving(20, 5.0), twice.begun_again(5.0, "another run")):
        assert other.share == 0 and other.rolled_back
    trial = twice.serving(20, 5.0)
    assert trial.judged(evidence(trial, *BETTER), 6.0).share == 0.05


def test_only_pairs_under_the_rules_of_the_stage_move_it() -> None:
    rules = AUTO.model_copy(update={"hook": "mine", "code": "c0de"})
    stage, job = begun(rules), JobTerms("tiny", 8)
    right = {"hook": "mine", "code": "c0de", "num_repeat": 8, "model": "tiny"}
    loose = GateRules(margin=0.99, alpha=0.49)
    for more in (
        {"rules": loose},
        {"hook": "other"},
        {"code": "other"},
        {"num_repeat": 2},
        {"model": "a"},
        {"suites": ("mine",)},
    ):
        for differences in (BETTER, WORSE):
            assert stage.judged(evidence(stage, *differences, **right | more), 3.0, job) is stage
    assert stage.judged(evidence(stage, *BETTER, **right), 3.0, job).share == 0.05


def test_a_stage_with_suites_asks_for_pairs_of_each() -> None:
    rules = AUTO.model_copy(update={"suites": ("b@1", "a@1")})
    stage, suites = begun(rules), {"suites": ("a@1", "b@1")}
    assert stage.judged(evidence(stage, *BETTER), 3.0) is stage
    live = evidence(stage, *BETTER, **suites)
    assert stage.judged(live, 3.0) is stage
    # a trial waits for the draws of those that are not decided
    many = evidence(stage, *[1.0, -1.0] * 200, **suites)
    assert many.tried == 0 and stage.judged(many, 3.0) is stage
    for name, reward in (("a@1", 0.9), ("b@1", 0.5)):
        for number in range(400):
            sides = {"challenger": SideResult(reward=reward), "incumbent": SideResult(reward=0.5)}
            live.add(Pair(group_id=f"{name} {number}", terms=live.terms, suite=name, **sides))
            many.add(Pair(group_id=f"{name} {number}", terms=live.terms, suite=name, **sides))
    assert stage.judged(live, 3.0).share == 0.05
    assert stage.judged(live, 3.0).why.endswith("; 2 of 2 suites not worse")
    assert many.tried == 400 and not stage.judged(many, 3.0).trial
    assert begun(rules.model_copy(update={"suites": ("a@2", "b@1")})).judged(live, 3.0).share == 0


def test_a_version_that_comes_back_is_tried_again() -> None:
    over = begun(version=10).judged(evidence(begun(version=10), *WORSE), 3.0)
    back = over.serving(4, 4.0)
    assert (over.tried, back.tried, back.trial) == (10, 4, False)
    assert back.serving(9, 5.0).trial


def test_a_trial_ends_by_the_clock_but_for_what_is_proven() -> None:
    stage, hour = begun(), 3600.0
    assert stage.at_time(2.0 + hour - 1) is stage
    over = stage.at_time(2.0 + hour)
    assert (over.trial, over.share) == (False, 0)
    canary = stage.moved(0.05, 10.0, VERDICT, "better")
    assert canary.at_time(9.0 + hour) is canary
    back = canary.at_time(10.0 + hour)
    assert (back.share, back.why, back.trial) == (0, "no proof in 1 hours", False)
    live = canary.moved(1.0, 10.0, VERDICT, "better")
    assert live.at_time(10.0 + 9 * hour) is live
    manual = begun(AUTO.model_copy(update={"mode": "manual"}))
    asks = manual.judged(evidence(manual, *BETTER), 3.0)
    assert asks.trial and asks.at_time(9 * hour) is asks
    assert not manual.moved(0.05, 3.0, "ann", "look").at_time(9 * hour).trial
    pinned = canary.set_pinned(True, "ann", "demo", 20.0).at_time(9 * hour)
    assert (pinned.share, pinned.trial) == (0.05, True)
    # let go, it is proven in its time or taken back: training waits for no requests that may not come
    free = pinned.set_pinned(False, "ann", "over", 9 * hour)
    assert free.at_time(9.9 * hour) is free
    assert (free.at_time(10 * hour).share, free.at_time(10 * hour).why) == (0, "no proof in 1 hours")
    early = canary.set_pinned(True, "ann", "demo", 20.0).set_pinned(False, "ann", "over", 21.0)
    assert early.until == canary.until
    assert asks.set_pinned(True, "ann", "demo", 20.0).set_pinned(False, "ann", "over", 9 * hour).until is None


@pytest.mark.parametrize("mode", ["manual", "never"])
def test_who_is_proven_worse_is_no_next_incumbent_also_where_a_person_takes_it_back(mode: Any) -> None:
    stage = begun(AUTO.model_copy(update={"mode": mode})).moved(1.0, 3.0, "ann", "up")
    proven = stage.judged(evidence(stage, *BETTER), 4.0)
    assert proven.successor == 5
    worse = proven.judged(evidence(stage, *WORSE), 5.0)
    assert (worse.share, worse.successor, worse.trial) == (1, None, False)
    assert worse.judged(evidence(stage, *WORSE), 6.0) is worse


def test_what_begins_live_learns_on_after_each_trial_and_is_taken_back_all_the_same() -> None:
    stage = begun(AUTO.model_copy(update={"begins": "live"}))
    assert (stage.share, stage.trial) == (1, True)
    for differences in (BETTER, [0.4, -0.4] * 200):
        over = stage.judged(evidence(stage, *differences), 3.0)
        assert (over.share, over.trial) == (1, False)
    assert stage.judged(evidence(stage, *WORSE), 3.0).rolled_back


def test_rules_that_change_move_nothing_and_whoever_answers_users_trains_no_more() -> None:
    free = AUTO.model_copy(update={"mode": "manual", "trial_every": None})
    stage = begun(free).moved(0.05, 3.0, "ann", "look")
    assert not stage.trial and stage.set_rules(free, 4.0) is stage
    held = stage.set_rules(AUTO, 4.0)
    assert (held.share, held.trial, held.version) == (0.05, True, stage.version + 1)
    assert not held.set_rules(free, 5.0).trial


def test_sides_that_are_not_what_was_drawn_hold_a_promotion_back() -> None:
    stage = begun().moved(0.25, 3.0, VERDICT, "better")
    fine, uneven = evidence(stage, *BETTER), evidence(stage, *BETTER)
    ours, theirs = SideResult(reward=0.65), SideResult(reward=0.35)
    for each, given in ((fine, (26, 74)), (uneven, (60, 60))):
        each.add(Pair(group_id="last", terms=each.terms, challenger=ours, incumbent=theirs, begun=given))
    assert fine.promotable() and not uneven.promotable()
    assert stage.judged(uneven, 4.0) is stage
    verdict = uneven.verdict()
    assert (verdict.begun, verdict.uneven) == ((60, 60), True)
    assert verdict.sentence.endswith("held back: 60 of 120 conversations went to the challenger, not 0.25 of them")


@pytest.mark.parametrize("shares", [[], [0.5, 0.25], [0.25, 0.25], [0.0], [1.0]])
def test_shares_rise(shares: list[float]) -> None:
    with pytest.raises(ValueError, match="shares"):
        StageRules.model_validate({"shares": shares})


def test_the_version_that_the_incumbent_is_has_no_trial_and_holds_no_training() -> None:
    first = ServingStage.begun("chat", "tiny, version 10", AUTO, 1.0, "salt", 10).serving(10, 2.0)
    trial = first.serving(15, 3.0)
    assert trial.trial
    # the run goes back to it (`up --step`), or its engine died in a trial and goes on from there
    for stage in (trial.begun_again(4.0, "the run went back to step 10", 10).serving(10, 5.0), trial.serving(10, 5.0)):
        assert (stage.trial, stage.until, stage.tried) == (False, None, 10)
        assert not stage.serving(14, 6.0).trial and stage.serving(15, 6.0).trial
        shown = stage.moved(1.0, 6.0, "ann", "to see it")
        other_rules = shown.set_rules(AUTO.model_copy(update={"trial_requests": 41}), 7.0)
        assert (shown.trial, other_rules.trial) == (False, False)
    # trained anew from before it, it would be proven and succeed nobody
    anew = trial.begun_again(4.0, "the run went back to step 4", 4).serving(4, 5.0)
    assert not anew.serving(10, 6.0).trial and anew.serving(10, 6.0).serving(15, 7.0).trial
    assert trial.set_pinned(True, "ann", "look", 4.0).serving(10, 5.0).trial, "what is pinned is held by a person"
