"""What the clients tell and ask the engine beside its start: code, agreements, numbers, several servers."""

from __future__ import annotations

import io
import math
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from swarm.client import SwarmClient
from swarm.errors import ConfigError, ConflictError, EngineError
from swarm.job import layered
from swarm.states import EngineState
from tests.swarm.client.conftest import QUICK
from tests.swarm.client.scripted import Answer, ScriptedServer
from tests.swarm.client.test_sync import JOB, status
from tests.swarm.code_snapshots.making import tracked

POOL = {
    "batch_size": 2,
    "num_repeat": 4,
    "slots": 8,
    "completed_tasks": 1,
    "completed_episodes": 5,
    "running_episodes": 2,
    "quarantined_episodes": 3,
    "dropped_episodes": 0,
    "tasks": {f"t{number}": 4 for number in range(25)},
}
SYNCED = {"success": True, "temp_ajet_code_path": "/code", "message": "unpacked"}
REFUSED = Answer({"error": {"message": "the engine is ENGINE.ROLLING: stop it"}}, 409)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('new')\n")
    (tmp_path / ".gitignore").write_text("*.key\n")
    tracked(tmp_path)
    (tmp_path / "mine.key").write_text("secret")
    return tmp_path


def test_code_goes_as_a_zip(server: ScriptedServer, client: SwarmClient, folder: Path) -> None:
    server.script("/sync_train_code", SYNCED)
    client.sync_train_code(b"PK")
    assert client.sync_train_code_from_dir(folder) == {"mine.key": "git ignores it"}
    (folder / "code.zip").write_bytes(b"PK2")
    client.sync_train_code(folder / "code.zip")
    given, packed, read = (one.body for one in server.requests)
    assert (given, read) == (b"PK", b"PK2")
    assert zipfile.ZipFile(io.BytesIO(packed)).read("train.py") == b"print('new')\n"
    assert {one.headers["content-type"] for one in server.requests} == {"application/zip"}
    with pytest.raises(ConfigError, match="cannot read the code archive"):
        client.sync_train_code(folder / "nowhere.zip")


def test_code_for_a_running_engine_is_refused_unless_it_may_restart(
    server: ScriptedServer, client: SwarmClient, folder: Path
) -> None:
    server.script("/sync_train_code", REFUSED)
    with pytest.raises(ConflictError, match="stop it"):
        client.sync_train_code_from_dir(folder)
    server.script("/sync_train_code", SYNCED | {"restarted": True})
    states = (EngineState.ROLLING, EngineState.BOOTING, EngineState.ROLLING)
    server.script("/status", *(status(state) for state in states))
    server.requests.clear()
    client.sync_train_code_from_dir(folder, force_restart=True)
    assert [one.path for one in server.requests] == ["/status", "/sync_train_code", "/status", "/status"]


def test_a_server_that_dies_in_a_forced_restart_gets_its_engine_back(
    server: ScriptedServer, client: SwarmClient, folder: Path
) -> None:
    server.script("/status", *(status(state) for state in (EngineState.ROLLING, EngineState.OFFLINE)))
    # the code was selected before it died
    gone = Answer({"error": {"message": "restarting"}}, 503)
    server.script("/sync_train_code", gone, SYNCED | {"changed": False})
    server.script("/start_engine", {"success": True, "pid": 1})
    assert client.sync_train_code(b"PK", force_restart=True).restarted
    paths = [one.path for one in server.requests]
    assert paths == ["/status", "/sync_train_code", "/sync_train_code", "/status", "/start_engine"]


@pytest.mark.parametrize("state", [EngineState.BOOTING, EngineState.OFFLINE])
def test_an_engine_that_somebody_else_started_first_runs_the_new_code(
    state: EngineState, server: ScriptedServer, client: SwarmClient
) -> None:
    server.script("/status", *(status(seen) for seen in (EngineState.ROLLING, EngineState.OFFLINE, state)))
    server.script("/sync_train_code", Answer({"error": {"message": "restarting"}}, 503), SYNCED | {"changed": False})
    server.script("/start_engine", Answer({"error": {"message": "the engine is BOOTING"}}, 409))
    if state is EngineState.BOOTING:
        assert client.sync_train_code(b"PK", force_restart=True).restarted
    else:
        with pytest.raises(ConflictError, match="BOOTING"):
            client.sync_train_code(b"PK", force_restart=True)


def test_an_engine_that_did_not_run_is_not_started_with_new_code(
    server: ScriptedServer, client: SwarmClient, folder: Path
) -> None:
    server.script("/status", status(EngineState.OFFLINE))
    server.script("/sync_train_code", SYNCED)
    client.sync_train_code_from_dir(folder, force_restart=True)
    assert [one.path for one in server.requests] == ["/status", "/sync_train_code"]


def test_an_infinity_reaches_the_job(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/sync_train_config", {"success": True})
    setting = {"actor_rollout_ref.actor.grad_clip": math.inf}
    client.sync_train_config("model: m", set=setting)
    [body] = server.bodies("/sync_train_config")
    assert layered({"model": "m"}, set_=body["set"]).job.overrides == setting


def test_an_agreement_that_does_not_count_is_no_error(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/agree_sync_weight", {"success": True}, {"success": False, "failure_reason": "nothing to train"})
    assert client.agree_sync_weight().success
    assert client.agree_sync_weight().failure_reason == "nothing to train"
    sent = server.bodies("/agree_sync_weight")
    assert [body["client_uuid"] for body in sent] == ["me"] * 2
    assert len({body["idempotency_key"] for body in sent}) == 2, "the second is no repetition"


def test_the_batch_is_printed(server: ScriptedServer, client: SwarmClient, capsys: pytest.CaptureFixture[str]) -> None:
    server.script("/get_current_batch_rollout_pool_information", POOL)
    client.print_rollout_stat()
    text = capsys.readouterr().out
    assert "1 of 2 complete" in text
    assert "5 of 8 finished, 2 of 8 slots run" in text
    assert "3 quarantined" in text
    assert "t19: 4 and 5 more" in text
    there = io.StringIO()
    client.print_rollout_stat(there)
    assert there.getvalue() == text


# -- several servers


def scripted(*states: EngineState, **more: Any) -> ScriptedServer:
    server = ScriptedServer()
    server.script("/status", *(status(state, JOB, **more) for state in states))
    server.script("/sync_train_config", {"success": True})
    server.script("/start_engine", {"success": True, "pid": 1})
    return server


OFFLINE, BOOTING, ROLLING = EngineState.OFFLINE, EngineState.BOOTING, EngineState.ROLLING


def test_several_engines_start_at_once_and_a_failure_names_its_server() -> None:
    both_boot = threading.Barrier(2, timeout=30)

    class Held(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            both_boot.wait()  # opens only if both are being started at once
            return True

    good = scripted(OFFLINE, BOOTING, ROLLING)
    bad = scripted(OFFLINE, BOOTING, OFFLINE, last_lines=["no memory"])
    for server in (good, bad):
        server.script("/start_engine", Answer({"success": True, "pid": 1}, wait=Held()))
    with good, bad, SwarmClient(good.url, policy=QUICK) as one, SwarmClient(bad.url, policy=QUICK) as other:
        with pytest.raises(ExceptionGroup, match=f"1 of 2 engines did not start: {bad.url}") as caught:
            SwarmClient.async_and_start_multi_engine([(one, JOB), (other, JOB)])
        [error] = caught.value.exceptions
        assert isinstance(error, EngineError)
        assert "no memory" in str(error)
        assert error.__notes__ == [f"this is the swarm server {bad.url}"]
    assert "/stop_engine" not in {one.path for one in good.requests}
