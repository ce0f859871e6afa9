"""A tutorial's readme as a test runs it: its ``sh`` blocks command by command, in a copy with ports that are free."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from study.experiment import free_ports

#: of one command: a machine with other work takes long
SECONDS = 400.0
TUTORIALS = Path(__file__).parents[2] / "tutorial"
#: what a server says when it can be used
_READY = re.compile(r"ready after|listening on")
_PROGRAMS = {"swarm-gateway": [sys.executable, "-m", "gateway.cli"], "python": [sys.executable]}


def commands(readme: str, language: str = "sh") -> list[list[str]]:
    """The commands of a readme's shell blocks, for this interpreter."""
    blocks = re.findall(rf"```{language}\n(.*?)```", readme, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    parsed = [words for line in lines if (words := shlex.split(line, comments=True)) and words[0] in _PROGRAMS]
    return [[*_PROGRAMS[program], *arguments] for program, *arguments in parsed]


def with_free_ports(folder: Path) -> None:
    """Replace the usual ports in all files of ``folder``."""
    ports = free_ports(2)
    for file in folder.rglob("*"):
        if file.suffix in (".md", ".yaml", ".py"):
            text = file.read_text()
            for usual, free in zip((8000, 10086), ports, strict=True):
                text = text.replace(f":{usual}", f":{free}").replace(f"port {usual}", f"port {free}")
                text = text.replace(f"port: {usual}", f"port: {free}")
            file.write_text(text)


@contextmanager
def running(command: list[str], folder: Path) -> Generator[subprocess.Popen[str]]:
    """A server, from when it says that it is ready; it must end by itself after one Ctrl-C."""
    said: list[str] = []
    ready = threading.Event()
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if _READY.search(line):
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
    """What a command says; it must succeed."""
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def tutorial_copy(name: str, into: Path) -> Path:
    """The folder of the tutorial ``name`` in a copy of all of them, with ports that are free."""
    copies = into / "tutorial"
    shutil.copytree(TUTORIALS, copies, ignore=shutil.ignore_patterns("runs", "report", "*-out", "__pycache__"))
    with_free_ports(copies)
    return copies / f"opencode_build_{name}"


def follow(name: str, into: Path, prepare: Callable[[Path], None] = lambda folder: None) -> tuple[Path, str]:
    """Do what the readme of the tutorial ``name`` says, in a copy of the tutorials; the model is there already.

    ``prepare`` is called with the copy of its folder.

    Returns:
        The copy of its folder, and what the commands said.
    """
    folder = tutorial_copy(name, into)
    prepare(folder)
    said: list[str] = []
    with ExitStack() as servers:
        for command in commands((folder / "readme.md").read_text()):
            if "pull" in command:
                continue  # the fixture has put the model there; the tests of the chat and of the scaffold pull it
            if "up" in command or (command[-1] != "--help" and {"swarm", "start"} <= set(command)):
                servers.enter_context(running(command, folder))
            else:
                said.append(run(command, folder))
    return folder, "".join(said)


def unknown_options(name: str) -> list[str]:
    """Options in the ``bash`` blocks, whose commands take too long for a test, that their scripts do not have."""
    folder = TUTORIALS / f"opencode_build_{name}"
    unknown: list[str] = []
    for _, script, *arguments in commands((folder / "readme.md").read_text(), "bash"):
        if script != "-m":
            source = (folder / script).read_text() + (TUTORIALS / "study" / "users.py").read_text()
            options = [one for one in arguments if one.startswith("--")]
            unknown += [f"{script} {option}" for option in options if f'"{option}"' not in source]
    return unknown
