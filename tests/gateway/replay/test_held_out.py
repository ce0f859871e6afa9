"""Held-out scores: their interval, and their picture."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gateway.replay.held_out import HeldOutConfig, HeldOutScore, interval
from gateway.replay.plot import draw_experiment
from gateway.replay.report import Report, StepPoint


def test_equal_values_have_no_interval() -> None:
    assert interval([0.5] * 10, 200, 0) == (0.5, 0.5)


def test_the_interval_is_the_normal_one_of_many_values() -> None:
    draw = random.Random(1)
    values = [draw.gauss(0.4, 0.1) for _ in range(400)]
    low, high = interval(values, 2000, 0)
    # 1.96 standard errors of 0.1 / sqrt(400) each way
    assert high - low == pytest.approx(2 * 1.96 * 0.1 / 20, rel=0.15)
    assert low < sum(values) / len(values) < high


def test_the_same_seed_gives_the_same_interval() -> None:
    values = [0.1, 0.9, 0.4, 0.3]
    assert interval(values, 500, 3) == interval(values, 500, 3)


@pytest.mark.parametrize("steps", [3, 16])
def test_an_experiment_is_drawn_with_and_without_control(tmp_path: Path, steps: int) -> None:
    def report(label: str) -> Report:
        return Report(
            label=label,
            data="d",
            target="t",
            model="m",
            seed=0,
            concurrency=1,
            seconds=1.0,
            requests=1,
            answered=1,
            cancelled=0,
            failures={},
            latency=None,
            steps=[StepPoint(step=step, reward_mean=0.5) for step in range(1, steps + 1)],
        )

    def score(label: str) -> HeldOutScore:
        config = HeldOutConfig(max_tokens=8)
        return HeldOutScore(
            label=label,
            mean=0.5,
            low=0.4,
            high=0.6,
            components={},
            tokens=3.0,
            policy_versions=[0],
            config=config,
            prompts=[],
        )

    for reports, scores in (
        (["trained"], ["base", "trained"]),
        (["trained", "control"], ["base", "trained", "control"]),
    ):
        path = tmp_path / f"{len(reports)}.png"
        draw_experiment([report(one) for one in reports], [score(one) for one in scores], path)
        assert path.read_bytes().startswith(b"\x89PNG")
