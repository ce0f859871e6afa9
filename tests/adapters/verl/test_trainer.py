"""verl's trainer without a cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.job import TrainJob
from swarm.link.engine import BatchRequests
from swarm.measures import REWARD


# verl imports what Ray has moved
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_run_that_died_behind_its_last_checkpoint_reports_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl", reason="needs the cpu extra")
    from adapters.verl.config import verl_config
    from adapters.verl.trainer import SwarmTrainer
    from tests.adapters.verl.compute_advantages import trainer_of

    monkeypatch.setattr(SwarmTrainer.__mro__[1], "fit", lambda self, manager: None)
    job = TrainJob(model="m", device="cpu", total_training_steps=7)

    def reported(step: int) -> list[tuple[int, str]]:
        trainer, sent = trainer_of(verl_config(job, "m", tmp_path, "cpu"), {}, {}), list[Any]()
        trainer.global_steps, trainer.total_training_steps = step, job.total_training_steps
        trainer._checkpoints = SimpleNamespace(batch_of=lambda step: f"batch {step}")
        trainer._feed.requests = BatchRequests(SimpleNamespace(send=sent.append))
        trainer.fit(None)
        return [(message.result.step, message.result.batch_id) for message in sent]

    # of an earlier step the server sends the batch again, and is told then
    assert [reported(6), reported(7)] == [[], [(7, "batch 7")]]


# verl imports what Ray has moved
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_profile_of_a_vllm_that_stays_awake_ends_with_the_batch(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="needs the cpu extra")
    from adapters.verl.config import verl_config
    from tests.adapters.verl.compute_advantages import trainer_of

    trainer = trainer_of(verl_config(TrainJob(model="m", device="cpu"), "m", tmp_path, "cpu"), {}, {})
    done: list[str] = []
    trainer._feed = SimpleNamespace(stays_awake=True, metrics={REWARD: 0.5})
    trainer.llm_server_manager = SimpleNamespace(stop_profile=lambda: done.append("profile"))
    for profiled, ends in ((False, []), (True, ["profile"])):
        trainer.curr_step_profile = profiled
        trainer.on_sample_end()
        assert done == ends


# verl imports what Ray has moved
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_full_disk_takes_a_loggers_lines_and_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("verl", reason="needs the cpu extra")
    from verl.utils.tracking import FileLogger, Tracking

    from adapters.verl.config import verl_config
    from tests.adapters.verl.compute_advantages import trainer_of

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "/dev/full")
    trainer = trainer_of(verl_config(TrainJob(model="m", device="cpu"), "m", tmp_path, "cpu"), {}, {})
    tracking, logged = Tracking("p", "e", "console"), list[Any]()
    tracking.logger = {"file": FileLogger("p", "e"), "other": SimpleNamespace(log=lambda **line: logged.append(line))}
    trainer.logger = tracking
    trainer.logger.log(data={"a": 1.0}, step=3)
    trainer.logger.finish(exit_code=0)
    assert logged == [{"data": {"a": 1.0}, "step": 3}], "the others have it"
    assert "the logger file has lost step 3: [Errno 28]" in capsys.readouterr().err
