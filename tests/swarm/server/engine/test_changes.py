"""Changes of what the engine runs, one at a time; the engine is a stand-in without a process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import ConflictError, EngineError
from swarm.job import TrainJob, dump_job
from swarm.server.config import ServerConfig
from swarm.server.engine.changes import Changes
from swarm.server.engine.snapshots import Snapshots
from swarm.states import EngineState
from tests.swarm.code_snapshots.making import zipped
from tests.swarm.server.engine.test_controller import JOB, claim, finish, ready, rolling

pytestmark = pytest.mark.anyio


class Engine:
    """A supervisor without processes; ``stopping`` lets its stops end, and ``fails`` its starts."""

    def __init__(self) -> None:
        self.controller = rolling()
        self.stopping = asyncio.Event()
        self.stopping.set()
        self.asked = asyncio.Event()
        self.fails = False
        self.did: list[str] = []

    async def start(self) -> int:
        self.did.append("start")
        if self.fails:
            raise EngineError("cannot start")
        self.controller.boot()
        self.controller.rollout_ready(ready())
        return 1

    async def stop(self, *, for_good: bool = False) -> None:
        self.did.append("stop for good" if for_good else "stop")
        self.asked.set()
        if for_good:
            self.controller.run_stopped()
        await self.stopping.wait()
        if self.controller.engine.state is not EngineState.OFFLINE:
            self.controller.offline("stopped")


def changes_of(engine: Engine, tmp_path: Path) -> Changes:
    supervisor: Any = engine
    config = ServerConfig(run_dir=tmp_path, allow_code_sync=True)
    return Changes(config, engine.controller, supervisor, Snapshots(tmp_path), None)


async def test_an_engine_that_is_stopped_during_a_forced_change_stays_stopped(tmp_path: Path) -> None:
    engine = Engine()
    changes = changes_of(engine, tmp_path)
    engine.stopping.clear()
    change = asyncio.create_task(changes.sync_job(dump_job(JOB), {}, force=True))
    await engine.asked.wait()
    stop = asyncio.create_task(changes.stop())
    await asyncio.sleep(0)
    engine.stopping.set()
    await asyncio.gather(change, stop)
    assert engine.did == ["stop", "start", "stop for good"]
    assert engine.controller.engine.state is EngineState.OFFLINE


async def test_a_damaged_snapshot_does_not_stop_the_engine(tmp_path: Path) -> None:
    engine = Engine()
    changes = changes_of(engine, tmp_path)
    code = tmp_path / "mine"
    (code / "my_reward").mkdir(parents=True)
    (code / "my_reward/__init__.py").write_text("NAME = 1")
    stored = Snapshots(tmp_path).add(zipped(code))
    file = Snapshots(tmp_path).files(stored.id) / "my_reward/__init__.py"
    file.chmod(0o644)
    file.write_text("NAME = 2")
    with pytest.raises(ConflictError, match="were changed"):
        await changes.select_code(stored.id, force=True)
    assert engine.did == []


async def test_what_is_wrong_with_a_change_is_told_though_the_engine_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    engine.fails = True
    changes = changes_of(engine, tmp_path)

    def refuse(job: TrainJob, from_step: int | None) -> bool:
        raise ConflictError("not this job")

    monkeypatch.setattr(engine.controller, "sync_job", refuse)
    with pytest.raises(ConflictError, match="not this job"):
        await changes.sync_job(dump_job(JOB), {}, force=True)
    assert engine.did == ["stop", "start"]


@pytest.mark.parametrize("lr", [JOB.lr, 0.5])
@pytest.mark.parametrize("died", [False, True])
async def test_an_engine_that_died_is_started_by_a_forced_change_and_a_stopped_one_is_not(
    tmp_path: Path, died: bool, lr: float
) -> None:
    engine = Engine()
    if died:
        engine.controller.engine.died("no module named mine")
    engine.controller.offline("it went")
    answer = await changes_of(engine, tmp_path).sync_job(dump_job(JOB), {"lr": lr}, force=True)
    assert answer.restarted == died and engine.did == ["start"] * died


@pytest.mark.parametrize("lr", [JOB.lr, 0.5])
async def test_a_job_that_differs_begins_a_new_run_and_says_so(tmp_path: Path, lr: float) -> None:
    engine = Engine()
    controller, changes = engine.controller, changes_of(engine, tmp_path)
    finish(controller, await claim(controller, 2), "a")
    before = controller.run.run_id
    answer = await changes.sync_job(dump_job(JOB), {"lr": lr}, force=True)
    assert (answer.restarted, answer.new_run) == (True, lr != JOB.lr)
    assert (controller.run.run_id != before) == answer.new_run
    assert controller.pool.information().completed_tasks == (0 if answer.new_run else 1)
