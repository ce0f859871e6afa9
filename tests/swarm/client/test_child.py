"""A swarm server that the client starts: one where none is, only on this machine, and gone with the client."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from swarm.client import AsyncSwarmClient, SwarmClient
from swarm.client.child import ServerChild
from swarm.errors import AuthenticationError, ConfigError, UnavailableError
from swarm.states import EngineState
from tests.ports import free_ports
from tests.swarm.client.conftest import QUICK
from tests.swarm.client.scripted import ScriptedServer
from tests.swarm.code_snapshots.making import tracked


def free_address() -> str:
    return f"http://127.0.0.1:{free_ports(1)[0]}"


def test_a_server_that_answers_is_left_alone(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("started a second server")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    server.script("/health", {"status": "ok"})
    SwarmClient(server.url, auto_start_swarm_server=True).close()


@pytest.mark.parametrize("url", ["http://10.255.255.1:1", "https://127.0.0.1:1", "http://127.0.0.1:1/prefix"])
def test_only_a_server_of_this_machine_is_started(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: Any) -> bool:
        return False

    monkeypatch.setattr("swarm.client.child._answers", silent)
    with pytest.raises(ConfigError, match="swarm-gateway swarm start"):
        SwarmClient(url, auto_start_swarm_server=True)


def test_a_server_that_ends_at_once_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.client.child._COMMAND", ("/bin/sh", "-c", "exit 3"))
    with pytest.raises(UnavailableError, match="ended with code 3"):
        SwarmClient(free_address(), auto_start_swarm_server=True)


def test_a_server_that_never_answers_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    # ends with its stdin, as ours does
    monkeypatch.setattr("swarm.client.child._COMMAND", ("/bin/sh", "-c", "cat > /dev/null"))
    monkeypatch.setattr("swarm.client.child.START_DEADLINE", 0.1)
    with pytest.raises(UnavailableError, match="did not answer"):
        SwarmClient(free_address(), auto_start_swarm_server=True)


def test_ctrl_c_does_not_reach_a_server_that_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "group"
    told = "import os, sys; open(sys.argv[1], 'w').write(f'{os.getpgrp()}.'); sys.stdin.read()"
    monkeypatch.setattr("swarm.client.child._COMMAND", (sys.executable, "-c", told, str(file)))

    async def answers(*_: Any) -> bool:
        return file.exists() and file.read_text().endswith(".")

    monkeypatch.setattr("swarm.client.child._answers", answers)
    SwarmClient(free_address(), auto_start_swarm_server=True).close()
    # a terminal and a notebook send it to all of the client's group
    assert file.read_text() != f"{os.getpgrp()}."


def test_a_forked_process_does_not_keep_a_server_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.client.child.STOP_DEADLINE", 5.0)
    # ends with its stdin, as ours does
    process = subprocess.Popen(["/bin/sh", "-c", "cat > /dev/null"], stdin=subprocess.PIPE)
    child = ServerChild(process)
    worker = get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    child.stop()
    assert process.returncode == 0, "it was killed"
    worker.kill()
    worker.join()


def test_a_client_that_started_a_server_is_not_closed_by_being_forgotten(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = [ServerChild(subprocess.Popen(["/bin/sh", "-c", "cat > /dev/null"], stdin=subprocess.PIPE))]

    async def ensure(*_: Any) -> ServerChild | None:
        return children.pop() if children else None

    monkeypatch.setattr(ServerChild, "ensure", ensure)
    # a notebook's cell, run twice: the second client finds the server that the first one started
    client = SwarmClient(server.url, auto_start_swarm_server=True)
    first = weakref.ref(client)
    client = SwarmClient(server.url, auto_start_swarm_server=True)
    second = weakref.ref(client)
    del client
    gc.collect()
    assert second() is None
    owner = first()
    assert owner is not None, "it stops the server of the second one"
    owner.close()


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_server_lives_as_long_as_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str, asynchronous: bool
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    # the folder in which the client runs may hold packages of any name
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway/__init__.py").write_text("raise SystemExit('imported from the working directory')")
    url = free_address()
    if asynchronous:
        async with AsyncSwarmClient(url, auto_start_swarm_server=True, policy=QUICK) as client:
            assert (await client.get_engine_status()).engine_status is EngineState.OFFLINE
    else:
        with SwarmClient(url, auto_start_swarm_server=True, policy=QUICK) as client:
            assert client.get_engine_status().engine_status is EngineState.OFFLINE
    with SwarmClient(url, policy=QUICK) as client, pytest.raises(UnavailableError, match="no swarm server answers"):
        client.get_engine_status()


@pytest.mark.slow
def test_a_started_server_has_the_token_of_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    url = free_address()
    with SwarmClient(url, token="a-secret", auto_start_swarm_server=True, policy=QUICK) as client:
        assert client.get_engine_status().engine_status is EngineState.OFFLINE
        with SwarmClient(url, policy=QUICK) as other, pytest.raises(AuthenticationError):
            other.get_engine_status()


@pytest.mark.slow
def test_a_started_server_takes_code_if_the_environment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/my_reward.py").write_text("")
    tracked(tmp_path / "code")
    with (
        SwarmClient(free_address(), auto_start_swarm_server=True, policy=QUICK) as client,
        pytest.raises(AuthenticationError, match="SWARM_ALLOW_CODE_SYNC=true"),
    ):
        client.sync_train_code_from_dir(tmp_path / "code")
    monkeypatch.setenv("SWARM_ALLOW_CODE_SYNC", "true")
    url = free_address()
    with SwarmClient(url, auto_start_swarm_server=True, policy=QUICK) as client:
        assert client.sync_train_code_from_dir(tmp_path / "code") == {}
    assert (tmp_path / "runs" / url.rpartition(":")[2] / "code/selected").is_file()


@pytest.mark.slow
def test_two_servers_of_one_folder_have_run_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    urls = [free_address(), free_address()]
    with (
        SwarmClient(urls[0], auto_start_swarm_server=True, policy=QUICK) as one,
        SwarmClient(urls[1], auto_start_swarm_server=True, policy=QUICK) as other,
    ):
        assert {one.get_engine_status().engine_status, other.get_engine_status().engine_status} == {EngineState.OFFLINE}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {url.rpartition(":")[2] for url in urls}
