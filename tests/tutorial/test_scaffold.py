"""What ``swarm-gateway new`` makes runs as its readme says: every command of it, in its order, with real servers, hooks
and users; only the engine process is a stand-in."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from study.experiment import free_ports

from gateway.replay.report import read_report
from gateway.scaffold import scaffold

pytestmark = pytest.mark.slow

SECONDS = 180.0
STEPS = 2


def commands(readme: str) -> list[list[str]]:
    """The commands of a readme's shell blocks, for this interpreter."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", readme, re.DOTALL) for line in block.splitlines()]
    parsed = [shlex.split(line, comments=True) for line in lines]
    programs = {"swarm-gateway": [sys.executable, "-m", "gateway.cli"], "python": [sys.executable]}
    return [[*programs[program], *arguments] for program, *arguments in parsed]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A new folder, with free ports for those of its configuration and fewer steps."""
    folder = scaffold("polite_agent", tmp_path / "tutorial")
    ports = free_ports(2)
    for file in ("README.md", "config.yaml", "mock_user_request.py"):
        text = (folder / file).read_text()
        for usual, free in zip((8000, 10086), ports, strict=True):
            assert str(usual) in text
            text = text.replace(str(usual), str(free))
        (folder / file).write_text(text.replace("--until-step 20", f"--until-step {STEPS}"))
    return folder


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """``up``, from when it says that it is ready; it must end by itself after one Ctrl-C."""
    said: list[str] = []
    ready = threading.Event()
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if "ready after" in line:
                    ready.set()
            ready.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            assert ready.wait(SECONDS) and process.poll() is None, "".join(said)
            yield process
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) in (0, 130), "".join(said)
        finally:
            process.kill()
            reader.join(10)


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.usefixtures("model_and_engine")
def test_every_command_of_its_readme_does_what_it_says(made: Path) -> None:
    test, pull, up, users = commands((made / "README.md").read_text())
    told = run(test, made)
    assert "tau with the rank  +1.000 over 2 groups" in told
    assert "order flips" in told
    assert "smollm2-135m" in run(pull, made)
    with running(up, made):
        told = run(users, made)
    report = read_report(made / "report")
    assert (report.label, report.failures) == ("polite_agent", {})
    # the engine may finish one more step before the users stop
    assert [point.step for point in report.steps][:STEPS] == [1, 2]
    assert all(0 < point.reward_mean <= 1 for point in report.steps)
    assert (made / "report" / "report.png").is_file()
    assert "mean reward" in told
    assert (made / "runs" / "polite_agent" / "journal.db").is_file()
