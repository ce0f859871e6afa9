"""The command as a process in a terminal, in front of a swarm server that is one too."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Generator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "gateway.cli"]
DEADLINE = 60.0


@pytest.fixture
def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("SWARM_TOKEN", "SWARM_GATEWAY_KEY")}
    return kept | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}


@pytest.fixture
def url(tmp_path: Path, environment: dict[str, str]) -> Generator[str]:
    start = [*COMMAND, "swarm", "start", "--port", "0", "--run-dir", str(tmp_path)]
    server = subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().rpartition(" ")[2].strip()
    finally:
        server.terminate()
        server.communicate(timeout=DEADLINE)


def test_in_a_terminal_it_shows_the_server_and_q_leaves_it(url: str, environment: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    monitor = subprocess.Popen(
        [*COMMAND, "monitor", "--swarm-url", url], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    screen = b""
    try:
        give_up = time.monotonic() + DEADLINE
        pressed = False
        while monitor.poll() is None:
            assert time.monotonic() < give_up, screen[-3000:].decode(errors="replace")
            if select.select([ours], [], [], 0.1)[0]:
                screen += os.read(ours, 65536)
            if not pressed and b"no training job yet" in screen:
                os.write(ours, b"q")
                pressed = True
        assert pressed and monitor.returncode == 0, screen[-3000:].decode(errors="replace")
        while select.select([ours], [], [], 0)[0]:
            screen += os.read(ours, 65536)
        assert "○ OFFLINE".encode() in screen and b"Traceback" not in screen
        assert b"\x1b[?1049l" in screen and termios.tcgetattr(theirs) == before, "the terminal is as it was"
    finally:
        monitor.kill()
        monitor.wait()
        os.close(ours)
        os.close(theirs)


def test_without_a_terminal_it_says_what_to_do(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*COMMAND, "monitor"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "swarm-gateway: the monitor needs a terminal; for scripts there is `swarm-gateway monitor --json`, which "
        "prints one status of all\n"
    )
