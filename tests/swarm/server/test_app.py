"""Serving: the port is bound first, its real number is told, and the server leaves no one waiting."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from swarm.errors import ConfigError
from swarm.job import TrainJob, dump_job
from swarm.server.app import JOURNAL_NAME, create_app, run
from swarm.server.config import ServerConfig
from swarm.server.journal.journal import Journal

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            run(ServerConfig(port=port, run_dir=tmp_path))


@pytest.mark.anyio
async def test_a_run_folder_of_another_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal.open(tmp_path / JOURNAL_NAME)
    try:
        told: list[str] = []
        with pytest.raises(ConfigError, match="in use by another swarm server"):
            await asyncio.to_thread(run, ServerConfig(port=0, run_dir=tmp_path), on_ready=told.append)
        assert told == [], "a server that does not start does not say that it listens"
        assert not [record for record in caplog.records if record.name == "uvicorn.error"], "the error says it all"
    finally:
        await journal.close()


@pytest.mark.anyio
async def test_checkpoints_of_which_the_journal_does_not_know_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / JOURNAL_NAME).touch()
    for told in (False, True):
        app = create_app(ServerConfig(run_dir=tmp_path))
        async with app.router.lifespan_context(app):
            pass
        assert ("holds checkpoints" in caplog.text) is told
        (tmp_path / "checkpoints" / "global_step_3").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_releases_long_polls_and_ends_the_process_and_its_engine(tmp_path: Path, number: int) -> None:
    code = (
        "import sys; from pathlib import Path; from swarm.server.config import ServerConfig; "
        "from swarm.server.app import run; "
        "run(ServerConfig(port=0, run_dir=Path(sys.argv[1])), on_ready=lambda url: print(url, flush=True), "
        "engine_command=(sys.executable, '-c', 'import time; time.sleep(60)'))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with httpx.Client(base_url=url, trust_env=False, verify=False, timeout=30) as client:
            job = dump_job(TrainJob(model="tiny", batch_size=1, num_repeat=2))
            client.post("/sync_train_config", json={"yaml_as_string": job})
            pid = client.post("/start_engine").json()["pid"]
            with ThreadPoolExecutor(1) as pool:
                body = {"client_uuid": "me", "wait_seconds": 60}
                claim = pool.submit(client.post, "/claim_episode", json=body)
                while not client.get("/status").json()["waiting_claims"]:
                    assert not claim.done()
                process.send_signal(number)
                assert "shutting down" in claim.result(60).json()["fail_cause"]
        assert process.wait(timeout=60) in (0, -signal.SIGTERM)
        assert not psutil.pid_exists(pid)
    finally:
        process.kill()
        process.communicate()
