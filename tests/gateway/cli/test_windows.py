"""The client's commands without what Windows lacks; servers say that they need another system."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.importer import python_path
from tests.ports import free_ports
from tests.swarm.code_snapshots.making import tracked

pytestmark = pytest.mark.slow

#: Takes away what Python lacks on Windows.
WITHOUT = """
import asyncio, os, shutil, signal, subprocess, sys, tempfile
import psutil  # which has other modules for Windows

for name in ("fcntl", "grp", "pwd", "resource", "termios", "uvloop"):
    sys.modules[name] = None
for name in (
    "fchmod", "fchown", "fork", "geteuid", "getpgid", "getuid", "killpg", "O_CLOEXEC", "O_DIRECTORY", "pread", "pwrite",
    "register_at_fork", "setsid", "statvfs", "uname",
):
    delattr(os, name)
for name in ("pthread_sigmask", "SIGHUP", "SIGKILL", "SIGUSR1"):
    delattr(signal, name)

open_file = os.open


def open_no_folder(path, *arguments, **options):
    if not isinstance(path, int) and os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return open_file(path, *arguments, **options)


os.open = open_no_folder
"""


def run(program: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What ``program`` does in ``folder`` as on Windows."""
    return subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT + program, *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=60,
    )


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run("from gateway.cli import main; main()", *arguments, folder=folder)


def test_the_clients_are_imported(tmp_path: Path) -> None:
    done = run(
        "import swarm.agentjet; from swarm.client import SwarmClient; SwarmClient('http://127.0.0.1:9').close()",
        folder=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("swarm", "status"),
        ("monitor", "--json"),
    ],
    ids=" ".join,
)
def test_commands_ask_the_server(arguments: tuple[str, ...], tmp_path: Path) -> None:
    [port] = free_ports(1)
    done = command(*arguments, "--swarm-url", f"http://127.0.0.1:{port}", folder=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"127.0.0.1:{port}" in done.stderr


def test_a_hook_is_tried(tmp_path: Path) -> None:
    hook = "def on_compute_relative_reward(task, candidates, context):\n    return [len(c.text) for c in candidates]\n"
    (tmp_path / "on_compute_relative_reward.py").write_text(hook)
    (tmp_path / "groups.jsonl").write_text(json.dumps({"prompt": "?", "candidates": ["a", "bb"]}))
    done = command("hooks", "test", ".", "--data", "groups.jsonl", "--json", folder=tmp_path)
    assert (json.loads(done.stdout)["scored"], done.stderr) == (1, "")


def test_code_is_packed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    tracked(tmp_path)
    done = command("code", "sync", "--dry-run", "--json", folder=tmp_path)
    assert (json.loads(done.stdout)["files"], done.stderr) == (["mine.py"], "")


def test_files_are_replaced(tmp_path: Path) -> None:
    program = "from pathlib import Path; from swarm.files import replace_file; replace_file(Path('report.json'), b'{}')"
    done = run(program, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "report.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("swarm", "start"),
        ("serve", "--swarm-url", "http://127.0.0.1:9", "--hooks", "concise"),
        ("serve", "--config", "gateway.yaml"),
    ],
    ids=" ".join,
)
def test_servers_say_what_they_need(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("{swarm_url: 'http://127.0.0.1:9', hooks: concise}")
    done = command(*arguments, folder=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "needs Linux or macOS" in done.stderr
