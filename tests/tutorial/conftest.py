from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.models.cache import Manifest, install, record_files, staging
from gateway.reports.report import Report, StepPoint

ROOT = Path(__file__).parents[2]
# the tutorials import their shared `study` package from there
sys.path.append(str(ROOT / "tutorial"))


@pytest.fixture
def model_and_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """smollm2-135m in the cache, and the stand-in engine for the servers that are started."""
    monkeypatch.setenv("SWARM_GATEWAY_HOME", str(tmp_path / "home"))
    with staging() as workspace:
        built = workspace / "model"
        built.mkdir()
        (built / "config.json").write_text("{}")
        files = record_files(built, lambda *_: None)
        install(built, Manifest(name="smollm2-135m", source="PyPI test", licence="Apache-2.0", files=files))
    paths = [str(Path(__file__).parent / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def report(label: str, *rewards: float) -> Report:
    """A report of one request, with these mean rewards by step."""
    return Report(
        label=label,
        data="q",
        target="app",
        model="m",
        seed=0,
        concurrency=4,
        seconds=1.0,
        requests=1,
        answered=1,
        cancelled=0,
        failures={},
        latency=None,
        steps=[StepPoint(step=n, reward_mean=reward) for n, reward in enumerate(rewards or (0.5, 0.5, 0.5), 1)],
    )


def score(label: str) -> Any:
    """A held-out score without prompts."""
    from study.held_out import HeldOutConfig, HeldOutScore

    return HeldOutScore(
        label=label,
        mean=0.5,
        low=0.4,
        high=0.6,
        components={},
        tokens=3.0,
        policy_versions=[0],
        config=HeldOutConfig(max_tokens=8),
        prompts=[],
    )
