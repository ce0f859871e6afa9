"""``ajet-swarm`` as a real process, started and looked at as AgentJet's client does it."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import IO, Any

import httpx
import psutil
import pytest
import yaml

from swarm.importer import load_attribute
from tests.ports import free_ports

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
#: what its client looks for in the output, for at most 60 s
PHRASE = "Interchange server is running in blocking mode"


@contextmanager
def launched(folder: Path, *flags: str) -> Generator[subprocess.Popen[str]]:
    """The command as its client starts it: detached, both outputs in one."""
    script = "from gateway.cli.agentjet import main; main()"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        ["nohup", sys.executable, "-c", script, "start", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environ,
        start_new_session=True,
    )
    deadline = Timer(180, process.kill)
    deadline.start()
    try:
        yield process
    finally:
        deadline.cancel()
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str]) -> str:
    """The line with the phrase."""
    assert process.stdout is not None
    output: IO[str] = process.stdout
    lines: list[str] = []
    for line in output:
        lines.append(line)
        if PHRASE in line:
            return line
    raise AssertionError(f"it ended without the phrase: {lines}")


def test_it_serves_on_loopback_and_says_so(tmp_path: Path) -> None:
    with launched(tmp_path, "--swarm-port=0") as process:
        url = told(process).split()[-1]
        assert (
            httpx.get(f"{url}/get_engine_status", timeout=60, trust_env=False).json()["engine_status"]
            == "ENGINE.OFFLINE"
        )
        hosts = {c.laddr.ip for c in psutil.Process(process.pid).net_connections("tcp") if c.status == "LISTEN"}
        assert hosts == {"127.0.0.1"}
        assert list(tmp_path.glob("runs/default/journal.db")), "in the folder where it was started"

        # a server that runs already is as good
        with launched(tmp_path, f"--swarm-port={url.rpartition(':')[2]}") as second:
            assert url in told(second)
            assert second.wait(60) == 0

        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)


def test_a_port_that_something_else_has_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # nobody answers there
        port = taken.getsockname()[1]
        with launched(tmp_path, f"--swarm-port={port}") as process:
            assert process.stdout is not None
            output = process.stdout.read()
            assert process.wait(60) == 2
    assert PHRASE not in output and f"port {port} on 127.0.0.1 is in use" in output


def test_the_command_is_installed() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert callable(load_attribute(scripts["ajet-swarm"]))


def test_how_long_a_step_waits_for_running_episodes_is_an_option(tmp_path: Path) -> None:
    with launched(tmp_path, "--swarm-port=0", "--post-rolling-timeout=-1") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "post_rolling_timeout" in output
    with launched(tmp_path, "--swarm-port=0", "--post-rolling-timeout=5") as process:
        assert PHRASE in told(process)


def test_servers_on_other_ports_have_run_folders_of_their_own(tmp_path: Path) -> None:
    [port] = free_ports(1)
    with launched(tmp_path, "--swarm-port=0") as first, launched(tmp_path, f"--swarm-port={port}") as second:
        assert told(first) != told(second)
        assert {path.name for path in (tmp_path / "runs").iterdir()} == {"default", str(port)}


def test_the_flags_of_agentjets_own_are_taken(tmp_path: Path) -> None:
    flags = ("--swarm-port=0", "--host=127.0.0.2", "--kill=ray|python", "--autokill", "--debug=TAG1|TAG2")
    with launched(tmp_path, *flags) as process:
        assert process.stdout is not None
        output: list[str] = []
        for line in process.stdout:
            output.append(line)
            if PHRASE in line:
                break
        assert "http://127.0.0.2:" in output[-1]
        assert "nothing is killed by its name" in "".join(output)


def test_it_listens_beyond_this_machine_with_a_token_only(tmp_path: Path) -> None:
    with launched(tmp_path, "--swarm-port=0", "--host=0.0.0.0") as process:
        assert process.stdout is not None
        output = process.stdout.read()
        assert process.wait(60) == 2
    assert PHRASE not in output and "token" in output


@pytest.mark.parametrize(
    ("conf", "defaults"),
    [
        ({"port": 0, "post_rolling_timeout": 240.0}, {}),
        ({"seed": 7, "lr": 1e-5}, {"seed": 7, "lr": 1e-5}),
        ({"ajet": {"data": {"train_batch_size": 3}, "rollout": {"num_repeat": 2}}}, {"batch_size": 3, "num_repeat": 2}),
    ],
)
def test_a_config_is_the_servers_or_the_jobs(tmp_path: Path, conf: dict[str, Any], defaults: dict[str, Any]) -> None:
    (tmp_path / "conf.yaml").write_text(yaml.safe_dump(conf))
    flags = () if "port" in conf else ("--swarm-port=0",)
    with launched(tmp_path, "--conf", "conf.yaml", *flags) as process:
        status = httpx.get(f"{told(process).split()[-1]}/status", timeout=60, trust_env=False).json()
        assert {name: status["job_defaults"].get(name) for name in defaults} == defaults
        assert "model" not in status["job_defaults"]


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ("ajet: {backbone: trinity}", "ajet.backbone cannot be 'trinity'"),
        ("port: usual", "conf.yaml: port: must be a whole number"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(tmp_path: Path, conf: str, said: str) -> None:
    (tmp_path / "conf.yaml").write_text(conf)
    with launched(tmp_path, "--conf", "conf.yaml") as process:
        assert process.stdout is not None
        output = process.stdout.read()
        assert process.wait(60) == 2
    assert said in output


@pytest.mark.parametrize("name", ["overwatch", "top"])
def test_overwatch_is_our_monitor(tmp_path: Path, name: str) -> None:
    with launched(tmp_path, "--swarm-port=0") as process:
        url = told(process).split()[-1]
        inside, outside = pty.openpty()
        script = "from gateway.cli.agentjet import main; main()"
        command = [sys.executable, "-c", script, name, f"--swarm-url={url}", "--refresh-interval=0.5"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        watching = subprocess.Popen(command, stdin=outside, stdout=outside, stderr=outside, env=environ)
        os.close(outside)
        deadline = Timer(180, watching.kill)
        deadline.start()
        try:
            shown = b""
            while b"OFFLINE" not in shown:
                shown += os.read(inside, 65536)
            os.write(inside, b"q")
            with suppress(OSError):  # how a terminal says that its programs have ended
                while os.read(inside, 65536):
                    pass
            assert watching.wait(60) == 0
        finally:
            deadline.cancel()
            watching.kill()
            watching.wait()
            os.close(inside)
