"""What a gate proves with pairs, and what it says."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from swarm.evidence.pairs import GateRules, Pair, SideResult, Terms
from swarm.evidence.verdict import PairedEvidence, Verdict

TERMS = Terms(route="chat", incumbent="gpt", challenger=3, hook="hooks", num_repeat=7)
_numbers = itertools.count()


def pair(
    ours: float | None, theirs: float | None = 0.5, *, terms: Terms = TERMS, suite: str = "", **fields: Any
) -> Pair:
    sides = {name: fields.pop(name, {}) for name in ("challenger", "incumbent")}
    return Pair(
        group_id=f"g{next(_numbers)}",
        terms=terms,
        suite=suite,
        challenger=SideResult(reward=ours, **sides["challenger"]),
        incumbent=SideResult(reward=theirs, **sides["incumbent"]),
    )


def evidence_of(pairs: list[Pair], terms: Terms = TERMS) -> PairedEvidence:
    evidence = PairedEvidence(terms)
    for each in pairs:
        evidence.add(each)
    return evidence


def verdict(pairs: list[Pair], terms: Terms = TERMS) -> Verdict:
    return evidence_of(pairs, terms).verdict()


def test_a_better_challenger_is_proven_and_said() -> None:
    found = verdict([pair(0.7), pair(0.5), pair(0.6)] * 40)
    assert (found.finding, found.promotable, found.requests) == ("better", True, 120)
    assert found.sentence == f"better by 0.10 [{found.low:.2f}, {found.high:.2f}] in 120 requests"
    assert 0 < found.low < 0.10 < found.high


def test_an_equal_challenger_is_not_worse_and_may_be_asked_for_more() -> None:
    equal = [0.4, 0.6] * 150
    found = verdict([pair(reward) for reward in equal])
    assert (found.finding, found.promotable) == ("not_worse", True)
    assert found.sentence.startswith("not worse than 0.05: +0.00 [-")
    strict = TERMS.model_copy(update={"rules": GateRules(better=True)})
    assert not verdict([pair(reward, terms=strict) for reward in equal], strict).promotable


def test_a_worse_challenger_is_stopped() -> None:
    found = verdict([pair(0.3), pair(0.4)] * 60)
    assert (found.finding, found.promotable) == ("worse", False)
    assert found.sentence.startswith("worse by 0.15 [0.")
    # proven below zero, though above the margin: it is held back all the same
    slightly = verdict([pair(0.48)] * 5000)
    assert (slightly.finding, slightly.promotable) == ("worse", False)


def test_little_is_not_decided() -> None:
    assert verdict([]).sentence == "nothing is compared yet"
    found = verdict([pair(0.7), pair(0.2)])
    assert (found.finding, found.promotable) == ("undecided", False)
    assert found.sentence == f"not decided: -0.05 [{found.low:.2f}, {found.high:.2f}] in 2 requests"


@settings(deadline=None)
@given(mean=st.sampled_from([-0.4, -0.05, 0.0, 0.05, 0.4]), width=st.floats(0, 0.5), seed=st.integers(0, 2**32))
def test_what_is_proven_and_the_interval_never_contradict_each_other(mean: float, width: float, seed: int) -> None:
    chance, evidence = random.Random(seed), PairedEvidence(TERMS)
    for _ in range(60):
        evidence.add(pair(min(1.0, max(0.0, 0.5 + mean + width * (2 * chance.random() - 1)))))
        now = evidence.verdict()
        assert -1 <= now.low <= now.difference <= now.high <= 1
        assert (now.low >= 0) >= (now.finding == "better")
        assert (now.low >= -TERMS.rules.margin) >= (now.finding == "not_worse")
        assert (now.high <= 0) >= (now.finding == "worse")
        assert (now.low <= 0 <= now.high) >= (now.finding in ("undecided", "not_worse"))
        assert now.finding not in ("better", "worse") or "-" not in now.sentence.partition(",")[0]


def test_each_protected_suite_must_be_not_worse_by_itself() -> None:
    terms = TERMS.model_copy(update={"suites": ("sums", "letters")})
    live = [pair(0.8, terms=terms) for _ in range(100)]
    sums = [pair(0.8, terms=terms, suite="sums") for _ in range(100)]
    missing = verdict(live + sums, terms)
    assert (missing.finding, missing.promotable) == ("better", False)
    assert missing.suites == {"letters": "undecided", "sums": "better"}
    assert missing.sentence.endswith("in 100 requests; 1 of 2 suites not worse, not proven: letters")
    worse = verdict([*live, *sums, *(pair(0.2, terms=terms, suite="letters") for _ in range(100))], terms)
    assert (worse.finding, worse.promotable) == ("worse", False)
    assert worse.sentence.endswith("1 of 2 suites not worse, worse: letters")
    fine = verdict([*live, *sums, *(pair(0.6, terms=terms, suite="letters") for _ in range(100))], terms)
    assert fine.promotable and fine.sentence.endswith("2 of 2 suites not worse")
    # by the name in the configuration, without the digest of the prompts
    named = TERMS.model_copy(update={"suites": ("sums@0123",)})
    assert verdict([], named).sentence == "nothing is compared yet; 0 of 1 suites not worse, not proven: sums"


def test_a_suite_that_lacks_judgements_proves_nothing_and_guards_are_of_live_requests() -> None:
    terms = TERMS.model_copy(update={"suites": ("sums",)})
    live = [pair(0.8, terms=terms) for _ in range(100)]
    sums = [pair(0.8, terms=terms, suite="sums", challenger={"characters": 900}) for _ in range(100)]
    sums += [pair(None, terms=terms, suite="sums", incumbent={"failed": 1.0}) for _ in range(3)]
    gaps = verdict(live + sums, terms)
    assert (gaps.suites, gaps.promotable, gaps.guards) == ({"sums": "undecided"}, False, ())
    assert gaps.sentence.endswith(
        "0 of 1 suites not worse, not proven: sums; held back: 3 of 103 draws of sums were not judged"
    )
    fewer = evidence_of(live + sums[:-1], terms)
    assert fewer.promotable() and fewer.draws("sums") == (102, 2)
    # many live requests do not make up for it, nor does the suite for them
    assert not verdict(live * 20 + sums, terms).promotable
    assert not verdict(
        [*live, *[pair(None, challenger={"failed": 0.0}, terms=terms)] * 3, *sums[:-1]], terms
    ).promotable


@pytest.mark.parametrize(
    ("ours", "theirs", "guard", "measured", "said"),
    [
        ({"failed": 0.3}, {}, "errors", 0.3, "more errors than max_errors 0.02 allows"),
        ({"refused": 0.4}, {}, "refusals", 0.4, "more refusals than max_refusals 0.05 allows"),
        ({"characters": 400}, {"characters": 100}, "length", 4.0, "longer than max_length 2 allows"),
    ],
)
def test_a_guard_that_is_proven_worse_stops_a_better_challenger(
    ours: dict[str, Any], theirs: dict[str, Any], guard: str, measured: float, said: str
) -> None:
    pairs = [pair(0.8, challenger=ours, incumbent=theirs) for _ in range(150)]
    assert evidence_of(pairs, TERMS).guarded()[guard] == pytest.approx(measured)
    found = verdict(pairs, TERMS)
    assert (found.finding, found.promotable, found.guards) == ("worse", False, (guard,))
    assert found.sentence.startswith("better by 0.30 ") and found.sentence.endswith(said)
    assert not verdict([pair(0.8, challenger=theirs, incumbent=ours) for _ in range(150)], TERMS).guards


@pytest.mark.parametrize("failed", ["challenger", "incumbent"])
def test_an_answer_that_failed_is_neither_long_nor_a_refusal(failed: str) -> None:
    long = [pair(0.8, challenger={"characters": 100}, incumbent={"characters": 100}) for _ in range(100)]
    sides: dict[str, Any] = {"challenger": {"characters": 900, "refused": 1.0}, "incumbent": {"characters": 1}}
    sides[failed] |= {"failed": 1.0}
    gone = [pair(0.8, **sides) for _ in range(100)]
    assert not {"length", "refusals"} & {*verdict([*long, *gone]).guards}


def test_the_slowest_twentieth_of_the_requests_is_guarded_by_a_time() -> None:
    terms = TERMS.model_copy(update={"rules": GateRules(max_p95_seconds=2)})

    def found(slow: int, failed: int = 0) -> Verdict:
        """Of 400 requests."""
        fine = [pair(0.8, terms=terms, challenger={"slowest_seconds": 2}) for _ in range(400 - slow - failed)]
        late = [pair(0.8, terms=terms, challenger={"slowest_seconds": 9}) for _ in range(slow)]
        lost = [pair(None, terms=terms, challenger={"failed": 1.0}) for _ in range(failed)]
        return verdict([*fine, *late, *lost], terms)

    assert evidence_of([], terms).guarded() == {}
    worse = found(slow=60)
    assert (worse.finding, worse.guards) == ("worse", ("p95_seconds",))
    assert worse.sentence.endswith("slower than max_p95_seconds 2 allows")
    assert not found(slow=20).guards and found(slow=20).promotable
    # what failed is an error, and not slow as well
    assert found(slow=0, failed=60).guards == ("errors",)


def test_what_was_not_judged_counts_for_nobody_and_holds_back() -> None:
    judged = [pair(0.8) for _ in range(100)]
    found = verdict([*judged, *(pair(None, challenger={"failed": 0.0}) for _ in range(3))])
    assert (found.finding, found.promotable, found.requests, found.unjudged) == ("better", False, 100, 3)
    assert found.sentence.endswith("; held back: 3 of 103 requests were not judged")
    assert verdict([*judged, pair(None)]).promotable
    # nobody can be compared with an incumbent that fails
    failing = [pair(0.8, None, incumbent={"failed": 1.0}) for _ in range(50)]
    assert verdict([*judged, *failing]).promotable
    # a judge that is dead from the first request on
    assert not verdict([pair(None, None) for _ in range(500)]).promotable


def test_the_chance_of_a_false_alarm_is_split_and_shown() -> None:
    terms = TERMS.model_copy(update={"suites": ("a", "b"), "rules": GateRules(alpha=0.1, max_length=None)})
    budget = verdict([], terms).budget
    assert set(budget) == {"reward", "a", "b", "errors", "refusals", "rating_drop"}
    assert sum(budget.values()) == pytest.approx(0.1) and budget["reward"] == 0.05


def test_a_suite_has_a_name() -> None:
    with pytest.raises(ValidationError, match="at least 1 character"):
        Terms(suites=("",))


def test_rewards_are_scaled_by_the_declared_bounds() -> None:
    rules = GateRules(bounds=(-1, 3))
    assert [rules.scaled(reward) for reward in (-1, 1, 3, 3.1, -1.1, float("nan"))] == [0, 0.5, 1, None, None, None]
    # a sum of shares may come to more than all of them
    assert [rules.scaled(reward) for reward in (3.0000000000000004, -1.0000000000000002, 3.00001)] == [1, 0, None]
    with pytest.raises(ValidationError, match="not below the upper one"):
        GateRules(bounds=(1, 1))


def test_what_a_newer_gateway_adds_is_left_out() -> None:
    newer: dict[str, Any] = {**pair(0.5).model_dump(), "feedback": 1.0}
    newer["terms"]["rules"]["more"] = newer["challenger"]["more"] = 1
    assert Pair.model_validate(newer).difference == 0.0


REWARDS = st.one_of(st.none(), st.floats(0, 1))
PAIRS = st.lists(
    st.tuples(
        REWARDS,
        REWARDS,
        st.sampled_from(("", "a", "b", "unprotected")),
        st.sampled_from((0.0, 0.5, 1.0)),
        st.floats(0, 1e6),
    ),
    max_size=30,
)


def built(rows: list[Any], terms: Terms) -> list[Pair]:
    return [
        pair(
            ours,
            theirs,
            terms=terms,
            suite=suite,
            challenger={"failed": failed, "characters": characters},
            incumbent={"characters": 9},
        )
        for ours, theirs, suite, failed, characters in rows
    ]


@settings(max_examples=60)
@given(rows=PAIRS, order=st.randoms(use_true_random=False))
def test_neither_the_order_of_pairs_nor_that_of_suites_matters_and_rows_give_the_state(
    rows: list[Any], order: random.Random
) -> None:
    terms = TERMS.model_copy(update={"suites": ("a", "b")})
    pairs = built(rows, terms)
    incremental = PairedEvidence(terms)
    alarmed: list[bool] = []
    for one in pairs:
        incremental.add(one)
        alarmed.append(incremental.alarm())
    found = incremental.verdict()
    assert verdict([Pair.model_validate_json(one.model_dump_json()) for one in pairs], terms) == found
    assert not alarmed or alarmed[-1] == (found.finding == "worse")
    other = TERMS.model_copy(update={"suites": ("b", "a")})
    assert other.digest == terms.digest
    assert verdict(order.sample(pairs, len(pairs)), other) == found


@settings(max_examples=60)
@given(rows=PAIRS, place=st.integers(0, 29), more=st.floats(0, 1))
def test_a_higher_reward_never_harms_the_challenger(rows: list[Any], place: int, more: float) -> None:
    terms = TERMS.model_copy(update={"suites": ("a",)})
    ranks = {"worse": 0, "undecided": 1, "not_worse": 2, "better": 3}
    before = verdict(built(rows, terms), terms)
    if place >= len(rows) or rows[place][0] is None or rows[place][0] > more:
        return
    after = verdict(built([*rows[:place], (more, *rows[place][1:]), *rows[place + 1 :]], terms), terms)
    assert ranks[after.finding] >= ranks[before.finding]
    assert after.promotable or not before.promotable
    assert after.low >= before.low and after.high >= before.high


def test_shares_and_bounds_at_the_ends_of_their_ranges_compare_all_the_same() -> None:
    rules = GateRules(max_length=1e300, margin=1 - 1e-16, max_rating_drop=2 - 1e-15)
    for share in (5e-324, 1 - 1e-16):
        assert verdict([], TERMS.model_copy(update={"share": share, "rules": rules})).finding == "undecided"
