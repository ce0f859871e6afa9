"""The engine's life, with a stand-in engine process that speaks the real link."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

from swarm.errors import ConfigError, ConflictError, EngineError
from swarm.job import TrainJob
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.engine.history import History
from swarm.server.engine.process import TOKEN_VARIABLE, EngineProcess
from swarm.server.engine.snapshots import Snapshots
from swarm.server.engine.supervisor import Supervisor, check_model, engine_environment
from swarm.server.journal.rows import BatchRow, StepRow
from swarm.states import EngineState
from swarm.status import MAX_RESTARTS, EngineFailure
from tests.processes import alive
from tests.standins import engine as standin
from tests.swarm.code_snapshots.making import zipped
from tests.swarm.server.engine.test_controller import JOB, claim, finish
from tests.swarm.server.memory import MemoryJournal

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LONG = 30.0
ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@asynccontextmanager
async def engine(
    tmp_path: Path,
    mode: str,
    command: tuple[str, ...] | None = None,
    journal: MemoryJournal | None = None,
    **config: Any,
) -> AsyncGenerator[tuple[Controller, Supervisor]]:
    settings = ServerConfig(run_dir=tmp_path / "run", **{"stop_grace": 5.0, "post_rolling_timeout": 0.0} | config)
    controller = Controller(settings)
    controller.open(journal or MemoryJournal())
    controller.sync_job(JOB)
    supervisor = Supervisor(settings, controller, command or standin.command(mode), restart_pause=0.01)
    try:
        yield controller, supervisor
    finally:
        await supervisor.stop()


async def fill_a_batch(controller: Controller) -> None:
    for task in "ab":
        finish(controller, await claim(controller, 2, LONG), task)


async def serves_version(controller: Controller, version: int) -> bool:
    engine = controller.engine
    return await engine.changed.until(lambda: engine.policy_version == version, LONG)


async def reach(controller: Controller, state: EngineState) -> None:
    await controller.engine.wait_for_state([state], LONG)
    assert controller.engine.state is state, controller.status()


async def test_boot_train_stop(tmp_path: Path) -> None:
    journal = MemoryJournal()
    async with engine(tmp_path, "train", journal=journal) as (controller, supervisor):
        pid = await supervisor.start()
        assert (controller.engine.state, controller.engine.pid) == (EngineState.BOOTING, pid)
        with pytest.raises(ConflictError, match="stop it"):
            await supervisor.start()
        await reach(controller, EngineState.ROLLING)
        # it comes from the driver: between the two roles' messages there is no order
        async with asyncio.timeout(LONG):
            while controller.engine.resolved_config is None:
                await anyio.lowlevel.checkpoint()
        assert controller.engine.resolved_config == {"lr": JOB.lr}
        for step in (1, 2):
            await fill_a_batch(controller)
            assert await serves_version(controller, step)
        assert [s.metrics["loss"] for s in controller.status().steps] == [0.25, 0.25]
        assert controller.status().steps[-1].metrics["swarm/episodes"] == 4.0
        await supervisor.stop()
        status = controller.status()
        assert (status.engine.engine_status, status.engine.engine_status_detail) == (EngineState.OFFLINE, "stopped")
        assert (status.engine_pid, status.engine_failure) == (None, None)
        assert not alive(pid)
        assert (tmp_path / "run" / "job.yaml").is_file()
        assert not journal.stops, "only a stop for good ends the run"
        await supervisor.start()
        await reach(controller, EngineState.ROLLING)
        await supervisor.stop(for_good=True)
        assert journal.stops == 1


async def test_an_engine_whose_server_ends_at_once_says_so(tmp_path: Path) -> None:
    async with engine(tmp_path, "train") as (controller, supervisor):
        pid = await supervisor.start()
        await reach(controller, EngineState.ROLLING)
        [run] = [task for task in asyncio.all_tasks() if task.get_name() == "engine-run"]
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert [start.reason for start in History(tmp_path / "run").all()] == ["the swarm server was shut down"]
        assert not alive(pid)


def sync_code(run_dir: Path) -> Path:
    code = run_dir.parent / "code"
    (code / "mine").mkdir(parents=True)
    (code / "mine/__init__.py").write_text("")
    snapshots = Snapshots(run_dir)
    stored = snapshots.add(zipped(code))
    snapshots.select(stored.id)
    return snapshots.files(stored.id)


async def test_synced_code_is_said_to_run_once_the_engine_tells_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "swarm.server")
    folder = sync_code(tmp_path / "run")
    async with engine(tmp_path, "train:imports", allow_code_sync=True) as (controller, supervisor):
        await supervisor.start()
        await reach(controller, EngineState.ROLLING)
    assert f"the driver and a Ray worker import the synced code in {folder}" in caplog.text


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("train:elsewhere", "a Ray worker imports mine from /elsewhere/mine.py"),
        ("train", "does not tell whether it runs the synced code"),
    ],
)
async def test_an_engine_that_does_not_run_the_synced_code_does_not_boot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, said: str
) -> None:
    caplog.set_level("INFO", "swarm.server")
    folder = sync_code(tmp_path / "run")
    async with engine(tmp_path, mode, allow_code_sync=True) as (controller, supervisor):
        await supervisor.start()
        await controller.engine.wait_for_state([EngineState.ROLLING, EngineState.OFFLINE], LONG)
        assert controller.engine.state is EngineState.OFFLINE
        detail = controller.status().engine.engine_status_detail
        assert said in detail and str(folder) in detail
    assert "import the synced code" not in caplog.text


async def test_an_engine_has_no_secrets_and_all_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_back = {"SWARM_TOKEN", "SWARM_PRIVATE_TOKEN", "PYTHONOPTIMIZE"}
    for name in kept_back:
        monkeypatch.setenv(name, "2")
    assert not kept_back & set(engine_environment("tcp://127.0.0.1:1", "token", tmp_path, None))


async def test_a_crash_while_booting_shows_the_last_lines(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "engine.log").write_text("from an earlier run\n")
    async with engine(tmp_path, "crash") as (controller, supervisor):
        await supervisor.start()
        await reach(controller, EngineState.OFFLINE)
        assert "exited with code 1" in controller.status().engine.engine_status_detail
        await supervisor.stop()
        lines = controller.status().last_lines
        assert lines[0] == "the engine starts"
        assert lines[-1] == "RuntimeError: out of memory"


async def test_a_log_that_was_cut_meanwhile_shows_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("of an earlier run\n" * 9)
    process = await EngineProcess.start(["true"], {TOKEN_VARIABLE: "t"}, tmp_path)
    await process.wait()
    assert process.last_lines() == []
    # as logrotate's copytruncate does
    log.write_text("the last words\n")
    assert process.last_lines() == ["the last words"]


async def test_an_engine_that_failed_is_offline_before_it_has_cleaned_up(tmp_path: Path) -> None:
    async with engine(tmp_path, "lingering", stop_grace=3.0) as (controller, supervisor):
        pid = await supervisor.start()
        # whether it rolls before is open: the request for a batch and the goodbye come from two roles
        await reach(controller, EngineState.OFFLINE)
        assert "out of memory" in controller.status().engine.engine_status_detail
        assert alive(pid), "it is given the time to clean up"


async def test_a_finished_run_goes_offline(tmp_path: Path) -> None:
    journal = MemoryJournal()
    async with engine(tmp_path, "one_step", journal=journal) as (controller, supervisor):
        await supervisor.start()
        await reach(controller, EngineState.ROLLING)
        await fill_a_batch(controller)
        await reach(controller, EngineState.OFFLINE)
        assert "the training run is finished" in controller.status().engine.engine_status_detail
        # the step and the goodbye come from two roles: between them there is no order
        await supervisor.stop()
        assert len(controller.status().steps) == 1
        assert journal.stops


async def test_deaths_in_a_row_are_counted_and_shown_until_there_is_a_step(tmp_path: Path) -> None:
    async with engine(tmp_path, "train") as (controller, supervisor):
        for count in (1, 2):
            os.kill(await supervisor.start(), 9)
            await reach(controller, EngineState.OFFLINE)
            failure = controller.status().engine_failure
            assert failure is not None and failure.count == count
            # nobody says who killed it: what to do if that was lack of memory is told
            assert failure.reason.startswith("the engine process was killed by SIGKILL: ")
            assert "make job.batch_size, max_prompt_length or max_response_length smaller" in failure.reason
        pid = await supervisor.start()
        await reach(controller, EngineState.ROLLING)
        assert controller.status().engine_failure == failure, "it is not forgotten by a start alone"
        await fill_a_batch(controller)
        assert await serves_version(controller, 1)
        assert controller.status().engine_failure is None
        os.kill(pid, 9)
        await reach(controller, EngineState.OFFLINE)
        assert controller.status().engine_failure is not None
        await supervisor.stop(for_good=True)
        assert controller.status().engine_failure is None, "a stop on purpose ends the row"


async def test_a_trainer_that_dies_beside_its_vllm_is_started_again(tmp_path: Path) -> None:
    async with engine(tmp_path, "mortal") as (controller, supervisor):
        pid = await supervisor.start()
        await reach(controller, EngineState.ROLLING)
        gone = controller.engine.served.gone
        await fill_a_batch(controller)
        await reach(controller, EngineState.BOOTING)
        assert controller.engine.failure == EngineFailure(reason="the trainer failed: out of memory", count=1)
        assert controller.engine.states.outlives_trainer
        assert await serves_version(controller, 1)
        assert (controller.engine.pid, controller.engine.failure, gone.happened) == (pid, None, False)
        [step] = controller.status().steps
        assert step.metrics["swarm/episodes"] == 4.0, "another batch than the one on which the first trainer died"


async def test_a_trainer_that_dies_again_and_again_ends_the_engine(tmp_path: Path) -> None:
    async with engine(tmp_path, "doomed") as (controller, supervisor):
        await supervisor.start()
        await reach(controller, EngineState.ROLLING)
        await fill_a_batch(controller)
        assert await controller.engine.changed.until(lambda: controller.pool.collection.dropped == 4, LONG)
        await reach(controller, EngineState.ROLLING)
        await fill_a_batch(controller)
        await reach(controller, EngineState.OFFLINE)
        assert controller.engine.failure is not None and controller.engine.failure.count > MAX_RESTARTS
        assert "the trainer failed: out of memory" in controller.engine.failure.reason
        assert not controller.engine.states.outlives_trainer


async def test_a_start_that_fails_counts_as_a_death(tmp_path: Path) -> None:
    async with engine(tmp_path, "", ("/nonexistent/engine",)) as (controller, supervisor):
        with pytest.raises(EngineError, match="could not be started"):
            await supervisor.start()
        assert controller.engine.state is EngineState.OFFLINE
        failure = controller.status().engine_failure
        assert failure is not None and "could not be started" in failure.reason


async def test_an_engine_says_that_its_configuration_is_wrong(tmp_path: Path) -> None:
    async with engine(tmp_path, "misconfigured") as (controller, supervisor):
        await supervisor.start()
        await reach(controller, EngineState.OFFLINE)
        failure = controller.status().engine_failure
        assert failure is not None and failure.wrong_config and "no such tokenizer" in failure.reason


async def test_a_batch_on_which_an_engine_fails_goes_to_the_next(tmp_path: Path) -> None:
    journal = MemoryJournal()
    async with engine(tmp_path, "failing", journal=journal) as (controller, supervisor):
        for attempt in (1, 2):
            await supervisor.start()
            await reach(controller, EngineState.ROLLING)
            if attempt == 1:
                await fill_a_batch(controller)
            await reach(controller, EngineState.OFFLINE)
            await supervisor.stop()
            assert "out of memory" in controller.status().engine.engine_status_detail
            assert journal.failures == list(range(1, attempt + 1))
        assert controller.pool.collection.outstanding is not None
        assert not journal.stops
        await supervisor.stop(for_good=True)
        assert journal.stops == 1, "also a run whose engine has crashed is ended by a stop"
        await supervisor.stop(for_good=True)
        assert journal.stops == 1


@pytest.mark.parametrize("mode", ["late", "torn"])
async def test_a_step_that_was_done_is_recorded_however_late_the_engine_says_so(tmp_path: Path, mode: str) -> None:
    journal = MemoryJournal()
    async with engine(tmp_path, mode, journal=journal) as (controller, supervisor):
        await supervisor.start()
        await reach(controller, EngineState.ROLLING)
        await fill_a_batch(controller)
        await reach(controller, EngineState.WEIGHT_SYNCING)
        if mode == "late":
            # the engine says it after Stop
            await supervisor.stop(for_good=True)
        else:
            # on one socket that it failed, on the other what it did before that
            await reach(controller, EngineState.OFFLINE)
            await supervisor.stop()
        (batch,) = [record.batch for record in journal.of(BatchRow)]
        assert [record.result.batch_id for record in journal.of(StepRow)] == [batch.batch_id]
        assert not journal.failures
        assert controller.pool.collection.outstanding is None
        failure = controller.status().engine_failure
        assert failure is None if mode == "late" else failure is not None and failure.count == 1


async def test_requests_that_come_again_too_late_change_nothing(tmp_path: Path) -> None:
    journal = MemoryJournal()
    async with engine(tmp_path, "stuttering", journal=journal) as (controller, supervisor):
        await supervisor.start()
        await reach(controller, EngineState.ROLLING)
        for step in (1, 2):
            await fill_a_batch(controller)
            assert await serves_version(controller, step)
        assert [record.result.step for record in journal.of(StepRow)] == [1, 2]
        assert len(journal.of(BatchRow)) == 2


async def test_no_engine_starts_for_a_run_that_is_not_on_disk(tmp_path: Path) -> None:
    journal = MemoryJournal()
    async with engine(tmp_path, "train", journal=journal) as (controller, supervisor):
        journal.failing = True
        for _ in range(3):
            with pytest.raises(EngineError, match="the disk is full"):
                await supervisor.start()
        assert controller.engine.state is EngineState.OFFLINE
        failure = controller.status().engine_failure
        assert failure is not None and failure.count == 1, "no lack of room makes anybody give up"
        journal.failing = False
        await supervisor.start()


async def test_a_silent_engine_is_noticed_and_killed(tmp_path: Path) -> None:
    async with engine(tmp_path, "silent", heartbeat_timeout=1.1, stop_grace=0.5) as (controller, supervisor):
        pid = await supervisor.start()
        await reach(controller, EngineState.ROLLING)
        await reach(controller, EngineState.OFFLINE)
        assert "has been silent for" in controller.status().engine.engine_status_detail
        await supervisor.stop()
        assert not alive(pid)


async def test_a_boot_has_a_deadline(tmp_path: Path) -> None:
    async with engine(tmp_path, "mute", boot_timeout=0.2) as (controller, supervisor):
        pid = await supervisor.start()
        await reach(controller, EngineState.OFFLINE)
        assert "did not boot within 0.2 s" in controller.status().engine.engine_status_detail
        await supervisor.stop()
        assert not alive(pid)


async def test_stop_leaves_nothing_behind(tmp_path: Path) -> None:
    async with engine(tmp_path, "stubborn", stop_grace=0.2) as (controller, supervisor):
        pid = await supervisor.start()
        await reach(controller, EngineState.ROLLING)
        daemon, child, segment = (tmp_path / "run" / "traces").read_text().split()
        assert alive(int(daemon)) and alive(int(child)) and segment in os.listdir("/dev/shm")
        await supervisor.stop()
        assert not any(alive(p) for p in (pid, int(daemon), int(child)))
        assert segment not in os.listdir("/dev/shm")
        assert not (tmp_path / "run" / "ray").exists()


async def test_what_somebody_else_links_in_the_run_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    async with engine(tmp_path, "mute") as (_, supervisor):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "ray").symlink_to(tmp_path / "precious")
        await supervisor.start()
        await supervisor.stop()
    assert (tmp_path / "precious").is_dir() and not (tmp_path / "run" / "ray").is_symlink()


async def test_a_copy_of_a_run_folder_leaves_the_ray_of_the_run_that_lives(tmp_path: Path) -> None:
    lives = tmp_path / "swarm-ray-lives"
    lives.mkdir()
    descriptor = os.open(lives, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    async with engine(tmp_path, "mute") as (_, supervisor):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "ray").symlink_to(lives)
        await supervisor.start()
        await supervisor.stop()
        assert lives.is_dir()
        os.close(descriptor)
        await supervisor.start()
        await supervisor.stop()
        assert not lives.is_dir() and not (tmp_path / "run" / "ray").is_symlink()


async def test_stop_while_booting(tmp_path: Path) -> None:
    async with engine(tmp_path, "mute") as (controller, supervisor):
        pid = await supervisor.start()
        await asyncio.gather(supervisor.stop(), supervisor.stop())
        assert controller.engine.state is EngineState.OFFLINE
        assert not alive(pid)


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "~/no-such-model", "a/b/c", "THERE/no"])
def test_a_model_that_is_a_path_must_be_there_and_a_name_is_left_to_the_engine(model: str, tmp_path: Path) -> None:
    for fine in (str(tmp_path), "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        check_model(TrainJob(model=fine))
    with pytest.raises(ConfigError, match="there is no folder"):
        check_model(TrainJob(model=model.replace("THERE", str(tmp_path))))
