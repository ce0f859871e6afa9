"""Prefixes computed once against verl's rows, through verl's real engine in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.job import TrainJob

config = pytest.importorskip("adapters.verl.config", reason="needs the cpu or gpu extra")

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("device", "setting", "shares"),
    [("cpu", "auto", True), ("cpu", "off", False), ("cuda", "auto", False), ("cuda", "on", True)],
)
def test_the_configuration_says_whether_to_share(tmp_path: Path, device: str, setting: str, shares: bool) -> None:
    job = TrainJob.model_validate({"model": "org/tiny", "shared_prefixes": setting})
    values = config.implied_values(job, "/models/tiny", tmp_path, device)
    assert values["actor_rollout_ref.shared_prefixes"] is shares


@pytest.mark.slow
def test_tries_give_what_rows_give(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.verl.compare_ways"],
        input=json.dumps({"folder": str(tmp_path), "ways": {"attend_by_nodes": 40, "attend_by_mask": 6}}),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    for way, found in told["ways"].items():
        worst = found["worst"]
        assert max(worst["log_probs"], worst["entropy"]) <= 1e-4, way
        assert worst["gradient"] <= 1e-5 and worst["cosine"] >= 0.999999, way
        assert {1} < set(found["parts"]), f"{way}: budgets that force splits, and that do not"
    # a job sets all dropout to 0
    assert told["refused"] == {"sliding window": True, "attention dropout": False, "no window": False}
