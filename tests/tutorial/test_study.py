"""The tutorials' shared study: runs with scripts in place of the command line, held-out intervals, and the plot."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from study import experiment
from study.held_out import HeldOutConfig, HeldOutScore, interval
from study.plot import draw_experiment

from gateway.replay.report import Report, StepPoint

BASE = Path(__file__).parents[2] / "tutorial" / "opencode_build_concise_agent" / "config.yaml"


def test_runs_differ_in_the_control_only(tmp_path: Path) -> None:
    configs = [
        experiment.run_config(BASE, tmp_path / name, control=control)[1]
        for name, control in (("a", False), ("b", True))
    ]
    assert [config["gateway"]["control"] for config in configs] == ["none", "shuffle"]
    assert configs[0]["job"] == configs[1]["job"]
    assert configs[0]["swarm"]["port"] != configs[0]["gateway"]["port"]
    assert Path(configs[0]["gateway"]["hooks"]) == BASE.parent


@pytest.mark.slow
def test_an_up_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = json.dumps({"event": "failed", "at": 1, "message": "no", "last_lines": ["boom"], "log": "/x/engine.log"})
    script = f"print({event!r}, flush=True); import sys; sys.exit(1)"
    monkeypatch.setattr(experiment, "CLI", [sys.executable, "-c", script])
    with (
        pytest.raises(experiment.ExperimentError, match=r"(?s)no.*boom.*full log: /x/engine.log"),
        experiment.running(tmp_path / "config.yaml", tmp_path / "up.log"),
    ):
        pytest.fail("it is not ready")


@pytest.mark.slow
def test_a_call_that_takes_too_long_is_killed() -> None:
    with pytest.raises(experiment.ExperimentError, match="waiting took longer than"):
        experiment.call([sys.executable, "-c", "import time; time.sleep(60)"], 0.2, "waiting")


def test_equal_values_have_no_interval() -> None:
    assert interval([0.5] * 10, 200, 0) == (0.5, 0.5)


def test_the_interval_is_the_normal_one_of_many_values() -> None:
    draw = random.Random(1)
    values = [draw.gauss(0.4, 0.1) for _ in range(400)]
    low, high = interval(values, 2000, 0)
    # 1.96 standard errors of 0.1 / sqrt(400) each way
    assert high - low == pytest.approx(2 * 1.96 * 0.1 / 20, rel=0.15)
    assert low < sum(values) / len(values) < high


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
