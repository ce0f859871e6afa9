"""``/sync_train_code``: who may, when, what is refused, and that the engine imports what was sent."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from swarm.control_protocol import SyncTrainCodeResponse
from swarm.credentials import TokenFile
from swarm.job import TrainJob, dump_job
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.engine.snapshots import Snapshots, Stored
from swarm.states import EngineState
from tests.standins.vllm import listening as serving
from tests.swarm.code_snapshots.making import zipped

pytestmark = pytest.mark.anyio

ZIP = {"content-type": "application/zip"}


@pytest.fixture
def archive(tmp_path: Path) -> bytes:
    code = tmp_path / "mine"
    (code / "my_reward").mkdir(parents=True)
    (code / "my_reward/__init__.py").write_text("NAME = 'synced'")
    return zipped(code)


def app_of(tmp_path: Path, **config: Any) -> Starlette:
    # what an engine that starts sees: it says so in its log and ends
    probe = (sys.executable, "-c", "import my_reward; print('imported', my_reward.NAME, my_reward.__file__)")
    config = {"allow_code_sync": True} | config
    return create_app(ServerConfig(run_dir=tmp_path / "run", **config), engine_command=probe)


def client_of(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", verify=False)


async def test_the_engine_imports_what_was_sent(
    tmp_path: Path, archive: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the server was started in a checkout of the same code
    checkout = tmp_path / "checkout"
    (checkout / "my_reward").mkdir(parents=True)
    (checkout / "my_reward/__init__.py").write_text("NAME = 'from the checkout'")
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("", str(checkout), ".")))
    app = app_of(tmp_path)
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as client,
    ):
        sent = await client.post("/sync_train_code", content=archive, headers=ZIP)
        told = SyncTrainCodeResponse.model_validate(sent.json())
        assert (sent.status_code, told.success, told.error) == (200, True, None)
        folder = Path(told.temp_ajet_code_path)
        assert (folder / "my_reward/__init__.py").is_file()
        job = dump_job(TrainJob(model="tiny", batch_size=1, num_repeat=2))
        assert (await client.post("/sync_train_config", json={"yaml_as_string": job})).json()["success"]
        assert (await client.post("/start_engine")).json()["success"]
        async with asyncio.timeout(30):
            while (await client.get("/get_engine_status")).json()["engine_status"] != "ENGINE.OFFLINE":
                pass
    log = (tmp_path / "run/engine.log").read_text()
    assert f"imported synced {folder}" in log


async def test_code_that_was_removed_is_said_at_the_start(tmp_path: Path, archive: bytes) -> None:
    app = app_of(tmp_path)
    async with app.router.lifespan_context(app), client_of(app) as client:
        folder = (await client.post("/sync_train_code", content=archive, headers=ZIP)).json()["temp_ajet_code_path"]
        shutil.rmtree(folder)
        await client.post("/sync_train_config", json={"yaml_as_string": "model: tiny"})
        started = await client.post("/start_engine")
        assert not started.is_success
        assert "sync it again" in started.text


async def test_a_file_from_before_1980_is_sent_back(tmp_path: Path, archive: bytes) -> None:
    async with client_of(app_of(tmp_path)) as client:
        sent = (await client.post("/sync_train_code", content=archive, headers=ZIP)).json()
        os.utime(Path(sent["temp_ajet_code_path"]) / "my_reward/__init__.py", (0, 0))
        answer = await client.get(f"/code/{sent['snapshot']['id']}")
    assert (answer.status_code, answer.content[:2]) == (200, b"PK")


async def test_off_unless_the_operator_turns_it_on(tmp_path: Path, archive: bytes) -> None:
    async with client_of(app_of(tmp_path, allow_code_sync=False)) as client:
        answer = await client.post("/sync_train_code", content=archive, headers=ZIP)
    told = answer.json()
    assert (answer.status_code, told["success"], told["code"]) == (403, False, "code_sync_disabled")
    assert "allow_code_sync: true" in told["error"]
    assert not (tmp_path / "run/code").exists()


@pytest.mark.parametrize("scope", ["claim", "read"])
async def test_for_admins_only(tmp_path: Path, archive: bytes, scope: Any) -> None:
    token = TokenFile(tmp_path / "run").create("ci", [scope])
    async with client_of(app_of(tmp_path)) as client:
        headers = ZIP | {"authorization": f"Bearer {token}"}
        assert (await client.post("/sync_train_code", content=archive, headers=headers)).status_code == 403
        assert (await client.post("/sync_train_code", content=archive, headers=ZIP)).status_code == 401
    assert not (tmp_path / "run/code").exists()


async def test_only_while_the_engine_is_offline(
    tmp_path: Path, archive: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_of(tmp_path)
    async with app.router.lifespan_context(app), client_of(app) as client:
        await client.post("/sync_train_config", json={"yaml_as_string": "model: tiny"})
        add = Snapshots.add

        def add_while_it_boots(self: Snapshots, archive: bytes, **sent: str) -> Stored:
            loop.call_soon_threadsafe(boot)
            return add(self, archive, **sent)

        def boot() -> None:
            if app.state.controller.engine.state is EngineState.OFFLINE:
                app.state.controller.boot()

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(Snapshots, "add", add_while_it_boots)
        for _ in range(2):
            answer = await client.post("/sync_train_code", content=archive, headers=ZIP)
            told = answer.json()
            assert (answer.status_code, told["success"], told["code"]) == (400, False, "engine_not_offline")
            assert "/stop_engine" in told["error"]
            assert app.state.controller.engine.state is EngineState.BOOTING
    assert Snapshots(tmp_path / "run").selected() is None


async def test_the_selected_code_again_changes_nothing_while_the_engine_runs_and_other_code_leaves_nothing(
    tmp_path: Path, archive: bytes
) -> None:
    app = app_of(tmp_path)
    async with app.router.lifespan_context(app), client_of(app) as client:
        await client.post("/sync_train_config", json={"yaml_as_string": "model: tiny"})
        first = SyncTrainCodeResponse.model_validate_json(
            (await client.post("/sync_train_code", content=archive, headers=ZIP)).content
        )
        app.state.controller.boot()
        again = await client.post("/sync_train_code", content=archive, headers=ZIP)
        told = SyncTrainCodeResponse.model_validate_json(again.content)
        assert (told.success, told.changed, told.snapshot) == (True, False, first.snapshot)
        (tmp_path / "mine/my_reward/__init__.py").write_text("NAME = 'another'")
        other = await client.post("/sync_train_code", content=zipped(tmp_path / "mine"), headers=ZIP)
        assert (other.status_code, other.json()["code"]) == (400, "engine_not_offline")
    assert [stored.about for stored in Snapshots(tmp_path / "run").all()] == [first.snapshot]


async def test_archives_that_are_refused(tmp_path: Path, archive: bytes) -> None:
    async with client_of(app_of(tmp_path)) as client:
        for content, headers, status, said in (
            (b"not a zip", ZIP, 400, "not a zip"),
            (b"", ZIP, 400, "not a zip"),
            (archive[:-1], ZIP, 400, "not a readable zip"),
            (archive, {"content-type": "application/json"}, 415, "application/zip"),
            (archive, {"content-type": "text/plain"}, 415, "application/zip"),
            (archive, ZIP | {"origin": "https://evil.example"}, 403, "evil"),
        ):
            answer = await client.post("/sync_train_code", content=content, headers=headers)
            assert answer.status_code == status, answer.text
            assert said in answer.text
            assert answer.headers["x-should-retry"] == "false"
        assert (await client.post("/status", content=archive, headers=ZIP)).status_code == 415
    assert Snapshots(tmp_path / "run").selected() is None


async def test_a_full_disk_is_said(tmp_path: Path, archive: bytes) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/code").write_text("no folder")
    async with client_of(app_of(tmp_path)) as client:
        answer = await client.post("/sync_train_code", content=archive, headers=ZIP)
    assert (answer.status_code, answer.json()["success"]) == (500, False)
    assert "cannot be stored" in answer.json()["error"]
