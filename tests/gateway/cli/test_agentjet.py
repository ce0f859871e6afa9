"""``ajet-swarm`` as a real process, started and looked at as AgentJet's client does it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import IO

import httpx
import psutil
import pytest

from swarm.importer import load_attribute

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
    deadline = Timer(60, process.kill)
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
        assert httpx.get(f"{url}/get_engine_status", trust_env=False).json()["engine_status"] == "ENGINE.OFFLINE"
        hosts = {c.laddr.ip for c in psutil.Process(process.pid).net_connections("tcp") if c.status == "LISTEN"}
        assert hosts == {"127.0.0.1"}
        assert list(tmp_path.glob("runs/default/journal.db")), "in the folder where it was started"

        # a server that runs already is as good
        with launched(tmp_path, f"--swarm-port={url.rpartition(':')[2]}") as second:
            assert url in told(second)
            assert second.wait(30) == 0

        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)


def test_a_port_that_something_else_has_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # nobody answers there
        port = taken.getsockname()[1]
        with launched(tmp_path, f"--swarm-port={port}") as process:
            assert process.stdout is not None
            output = process.stdout.read()
            assert process.wait(30) == 2
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
