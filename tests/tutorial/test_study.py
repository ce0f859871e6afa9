"""The tutorials' shared study: runs with scripts in place of the command line, held-out intervals, and the plot."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from study import experiment
from study.curves import interval
from study.plot import draw_experiment

from tests.tutorial.conftest import report, score

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


def test_the_interval_is_the_normal_one_of_many_values() -> None:
    draw = random.Random(1)
    values = [draw.gauss(0.4, 0.1) for _ in range(400)]
    low, high = interval(values, 2000, 0)
    # 1.96 standard errors of 0.1 / sqrt(400) each way
    assert high - low == pytest.approx(2 * 1.96 * 0.1 / 20, rel=0.15)
    assert low < sum(values) / len(values) < high
    assert interval([0.5] * 10, 200, 0) == (0.5, 0.5)


def test_an_experiment_is_drawn_with_its_control(tmp_path: Path) -> None:
    labels = ["base", "trained", "control"]
    draw_experiment([report(label) for label in labels[1:]], [score(label) for label in labels], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
