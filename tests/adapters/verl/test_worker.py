"""verl's worker on a CPU: what it goes on from, and what it sends to vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine import tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What :mod:`tests.adapters.verl.lone_worker` prints."""
    pytest.importorskip("verl", reason="needs the cpu extra")
    folder = tmp_path_factory.mktemp("worker")
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.verl.lone_worker"],
        input=json.dumps({"model": str(tiny_model.build(folder / "tiny")), "checkpoint": str(folder / "saved")}),
        cwd=Path(__file__).parents[3],
        env=os.environ | {"DIST_INIT_METHOD": f"file://{folder / 'ranks'}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_job_with_another_rate_goes_on_with_that(found: dict[str, Any]) -> None:
    # the second and third of four steps of warm-up, to a rate of 0.01
    assert found["resumed"] == {"rates": pytest.approx([0.0025, 0.005]), "weight_decay": 0.0, "moments": True}


def test_an_adapter_that_is_merged_on_a_cpu_is_not_rounded(found: dict[str, Any]) -> None:
    assert found["merged"] == {"types": ["torch.float32"], "far": pytest.approx(0, abs=1e-6), "changed": 0.0}


def test_an_adapter_on_a_cpu_is_what_verl_would_send(found: dict[str, Any]) -> None:
    # two matrices for each of seven layers of two blocks
    assert found["adapter"] == {"weights": 28, "equal": 28, "configured": True}
