"""The disk of the checkpoints fills up under a real engine: training goes on without them, and they come back."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from swarm.checkpoints import saved_step
from swarm.job import TrainJob
from tests.disks import fill, small_disk
from tests.engine import tiny_model
from tests.engine.engine_process import DEVICE
from tests.engine.test_gateway_loop import ASK, HOOKS, READY_SECONDS, STEP_SECONDS
from tests.up_process import Up, Users

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs the cpu extra"),
]


def test_training_outlives_a_full_disk_of_checkpoints(tmp_path: Path) -> None:
    tiny_model.build(tmp_path / "tiny")
    (tmp_path / "letters.py").write_text(HOOKS)
    job = {
        "model": "tiny",
        "device": DEVICE,
        "batch_size": 2,
        "num_repeat": 2,
        "max_prompt_length": 256,
        "max_response_length": 16,
        "serving": "always",
        "save_freq": 1,
        "keep_checkpoints": 1,
    }
    gateway = {"port": 0, "hooks": "letters:hooks"}
    path = tmp_path / "up.yaml"
    path.write_text(yaml.safe_dump({"job": job, "swarm": {"port": 0, "run_dir": "run"}, "gateway": gateway}))
    with small_disk(tmp_path / "run" / "checkpoints", 64) as disk, ExitStack() as stack:
        up = Up(path)
        try:
            up.expect("ready", READY_SECONDS)
            users = stack.enter_context(Users(f"{up.url('gateway')}/v1", ASK, count=4, patience=STEP_SECONDS))
            for _ in range(2):
                up.expect("step", STEP_SECONDS)
            before = saved_step(TrainJob.model_validate(job), tmp_path / "run")
            ballast = fill(disk)
            assert before > 0
            assert up.expect("disk_full", 10.0)["path"] == str(disk)
            told = up.expect("warning", STEP_SECONDS, saying="is not written")["message"]
            assert str(disk) in told and "free some space there" in told
            for _ in range(2):
                last = up.expect("step", STEP_SECONDS)["step"]
            ballast.unlink()
            up.expect("warning", STEP_SECONDS, saying="has room again")
            users.leave()
            assert up.interrupt() == 0
        finally:
            up.end()
        assert saved_step(TrainJob.model_validate(job), tmp_path / "run") >= last
        assert not list(disk.glob(".incomplete*"))
    kinds = {one["event"] for one in up.seen}
    assert not kinds & {"restarting", "trainer_restarting"}, "the trainer outlived it"
    assert {one.status for one in users.answers} == {200}
