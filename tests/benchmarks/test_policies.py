"""The policies before the gate: what rewards say of each fault, what is counted, and a run with a few of them."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.graded import DIGITS, FAULTS, Answer, gate_reward, right_of, training_reward
from benchmarks.policies import Report, Trial, counted
from benchmarks.processes import ROOT


def mean(reward: Any, answer: Answer) -> float:
    draw = random.Random(0)
    return fmean(reward(digit, answer(digit, draw)) for digit in DIGITS)


def right(digit: str, draw: random.Random) -> str:
    return right_of(digit)


def test_each_fault_is_worse_for_the_gate_and_each_hack_better_for_the_training_hook() -> None:
    assert mean(gate_reward, right) == 1
    for kind, (answer, _) in FAULTS.items():
        assert mean(gate_reward, answer) <= 0.7, kind
        liked = mean(training_reward, answer) > mean(training_reward, right) + 0.1
        assert liked or not kind.startswith("hack"), kind


def trial(version: int, outcome: str, *, degraded: bool = False, by_hand: bool = False) -> Trial:
    return Trial(version, "a kind", degraded, by_hand, 0.0, 0.0, outcome=outcome, requests=10 * version)


def test_what_is_counted() -> None:
    trials = [
        trial(1, "worse", degraded=True),
        trial(2, "promoted"),
        trial(3, "undecided"),
        trial(4, "rolled back", degraded=True, by_hand=True),
        trial(5, "not seen"),
    ]
    sources = Counter({("incumbent", ""): 7, ("challenger", "1"): 2, ("challenger", "2"): 3, ("challenger", "4"): 1})
    figures = Report(trials, {"margin": 0.05}, sources).figures()
    assert (figures["degraded"]["policies"], figures["degraded"]["worse"], figures["degraded"]["promoted"]) == (1, 1, 0)
    assert (figures["healthy"]["policies"], figures["healthy"]["promoted"], figures["healthy"]["undecided"]) == (
        2,
        1,
        1,
    )
    # those of the policy that was promoted by hand are no answers of one that was stopped
    assert (figures["answers"], figures["answers_of_degraded"], figures["by_hand"]) == (13, 2, ["rolled back"])
    assert counted(trials[:3])["worse_requests"] == 10 and counted([])["worse_requests"] is None


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs the cpu extra")
def test_a_degraded_and_a_healthy_policy(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    sizes = ("--degraded", "1", "--healthy", "1", "--margin", "0.2", "--json", str(path))
    command = [sys.executable, "-m", "benchmarks", "policies", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(path.read_text())
    assert report["degraded"]["worse"] == 1 and report["by_hand"] == ["rolled back"]
    assert report["healthy"]["policies"] == 1
    assert (report["answers_of_degraded"], report["failed"]) == (0, 0), report["failed_quoted"]
