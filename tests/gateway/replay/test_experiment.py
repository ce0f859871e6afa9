"""Runs as an experiment drives them, with scripts in place of the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gateway.replay import experiment

BASE = Path(__file__).parents[3] / "tutorial" / "opencode_build_concise_agent" / "config.yaml"


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
