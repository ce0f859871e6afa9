"""Run a client as a process of its own, with nothing of this machine's settings."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clients.environments import Environment

APPS = Path(__file__).parent / "apps"
_SECONDS = 300
_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR")


def needs(environment: Environment) -> None:
    """Fail unless the client is installed: whoever asks for this suite wants to know."""
    if not environment.installed:
        pytest.fail(f"{environment.requirement} is not installed: python -m tests.clients.environments")


def run(command: list[str], home: Path, more: Mapping[str, str] | None = None, typed: str = "") -> str:
    """What ``command`` prints; it runs in ``home``, which is also its home directory."""
    done = subprocess.run(
        command,
        cwd=home,
        env=_environment(command, home, more),
        input=typed,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=_SECONDS,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def interrupt(command: list[str], home: Path, more: Mapping[str, str], begun: Path) -> None:
    """Run ``command`` as :func:`run`, press Ctrl-C once the file ``begun`` is there, and wait for its end."""
    process = subprocess.Popen(
        command,
        cwd=home,
        env=_environment(command, home, more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until_there(begun)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until_there(path: Path) -> None:
    """Wait for a file that another process makes."""
    deadline = time.monotonic() + _SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def _environment(command: list[str], home: Path, more: Mapping[str, str] | None) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    # the node that was installed with a client
    kept["PATH"] = os.pathsep.join([str(Path(command[0]).parent), kept["PATH"]])
    return {"PYTHONIOENCODING": "utf-8", **kept, "HOME": str(home), **(more or {})}
