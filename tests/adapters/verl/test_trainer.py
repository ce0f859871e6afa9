"""verl's trainer without a cluster, in a process of its own, because importing verl takes long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import tiny_model

pytestmark = pytest.mark.slow

RESUMED = """
import tempfile
from pathlib import Path
from types import SimpleNamespace

from adapters.verl.config import verl_config
from adapters.verl.trainer import SwarmTrainer
from swarm.job import TrainJob
from swarm.link.engine import BatchRequests
from tests.adapters.verl.compute_advantages import trainer_of

job = TrainJob(model="m", device="cpu", total_training_steps=7)
for step in (6, 7):
    trainer, sent = trainer_of(verl_config(job, "m", Path(tempfile.gettempdir()), "cpu"), {}, {}), []
    SwarmTrainer.__mro__[1].fit = lambda self, manager: None
    trainer.global_steps, trainer.total_training_steps = step, job.total_training_steps
    trainer._checkpoints = SimpleNamespace(batch_of=lambda step: f"batch {step}")
    trainer._feed.requests = BatchRequests(SimpleNamespace(send=sent.append))
    trainer.fit(None)
    print([(message.result.step, message.result.batch_id) for message in sent])
"""


def test_a_run_that_died_behind_its_last_checkpoint_reports_that_step() -> None:
    pytest.importorskip("verl", reason="needs the cpu extra")
    done = subprocess.run(
        [sys.executable, "-c", RESUMED], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # of an earlier step the server sends the batch again, and is told then
    assert done.stdout.splitlines()[-2:] == ["[]", "[(7, 'batch 7')]"]


def test_an_adapter_that_is_merged_on_a_cpu_is_not_rounded(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="needs the cpu extra")
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.verl.merge_worker"],
        input=json.dumps({"model": str(tiny_model.build(tmp_path / "tiny"))}),
        cwd=Path(__file__).parents[3],
        env=os.environ | {"DIST_INIT_METHOD": f"file://{tmp_path / 'ranks'}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {"types": ["torch.float32"], "far": pytest.approx(0, abs=1e-6), "changed": 0.0}
