"""Prefixes computed once against verl's rows, through verl's real engine in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the cpu extra")

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "examples"), [("attend_by_nodes", 40), ("attend_by_mask", 6)])
def test_tries_give_what_rows_give(tmp_path: Path, way: str, examples: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.verl.compare_ways"],
        input=json.dumps({"folder": str(tmp_path), "examples": examples, "way": way}),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    worst = found["worst"]
    assert max(worst["log_probs"], worst["entropy"]) <= 1e-4
    assert worst["gradient"] <= 1e-5 and worst["cosine"] >= 0.999999
    assert {1} < set(found["parts"]), "budgets that force splits, and that do not"
    assert found["refused"] == {"sliding window": True, "attention dropout": True, "no window": False}
