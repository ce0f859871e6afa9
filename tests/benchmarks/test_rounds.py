"""Figures of several rounds become one report."""

from benchmarks.rounds import summary


def test_numbers_become_medians_and_ratios_keep_their_spread() -> None:
    rounds = [{"ours": {"ms": ms, "cpu_ratio": {"16": ms / 10}}, "name": "x"} for ms in (1.0, 4.0, 2.0)]
    assert summary(rounds) == {
        "ours": {"ms": 2.0, "cpu_ratio": {"16": {"median": 0.2, "least": 0.1, "most": 0.4}}},
        "name": "x",
    }


def test_one_round_is_as_it_is() -> None:
    assert summary([{"ours": {"ratio": 0.3, "rate": None}}]) == {"ours": {"ratio": 0.3, "rate": None}}


def test_a_subject_that_failed_in_a_round_is_as_in_the_last_one() -> None:
    assert summary([{"peer": {"ms": 1.0}}, {"peer": {"error": "gone"}}]) == {"peer": {"error": "gone"}}
    assert summary([{}, {"peer": {"ms": 1.0}}]) == {"peer": {"ms": 1.0}}
