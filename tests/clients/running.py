"""Run a client as a process of its own, with nothing of this machine's settings."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clients.environments import NodeEnv, PythonEnv

APPS = Path(__file__).parent / "apps"
_SECONDS = 300
_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR")


def needs(environment: PythonEnv | NodeEnv) -> None:
    """Fail unless the client is installed: whoever asks for this suite wants to know."""
    if not environment.installed:
        pytest.fail(f"{environment.requirement} is not installed: python -m tests.clients.environments")


def run(command: list[str], home: Path, more: Mapping[str, str] | None = None, typed: str = "") -> str:
    """What ``command`` prints; it runs in ``home``, which is also its home directory."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    env = {"PYTHONIOENCODING": "utf-8", **kept, "HOME": str(home), **(more or {})}
    done = subprocess.run(
        command, cwd=home, env=env, input=typed, capture_output=True, text=True, encoding="utf-8", timeout=_SECONDS
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout
