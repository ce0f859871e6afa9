"""A tutorial's readme as a test runs it: its ``sh`` blocks command by command, in a copy with ports that are free."""

from __future__ import annotations

import argparse
import io
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from gateway.cli.root import app
from tests.ports import free_ports

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
    usual_ports = (8000, 8001, 10086, 10087)
    ports = free_ports(len(usual_ports))
    for file in folder.rglob("*"):
        if file.suffix in (".md", ".yaml", ".py"):
            text = file.read_text()
            for usual, free in zip(usual_ports, ports, strict=True):
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


def folder_of(name: str, tutorials: Path = TUTORIALS) -> Path:
    """The folder of the tutorial ``name``, which is what follows ``opencode_build_`` where it begins so."""
    named = tutorials / f"opencode_build_{name}"
    return named if named.is_dir() else tutorials / name


def readme_of(name: str) -> str:
    return (folder_of(name) / "readme.md").read_text()


def tutorial_copy(name: str, into: Path) -> Path:
    """The folder of the tutorial ``name`` in a copy of all of them, with ports that are free."""
    copies = into / "tutorial"
    shutil.copytree(TUTORIALS, copies, ignore=shutil.ignore_patterns("runs", "report", "*-out", "__pycache__"))
    with_free_ports(copies)
    return folder_of(name, copies)


@contextmanager
def following(folder: Path) -> Generator[str]:
    """Do what the readme in ``folder`` says: the commands of its ``sh`` blocks, with the variables that it exports; the
    model is there already. Gives what they said; the servers run to the end of the block, and must end by themselves.
    """
    text = (folder / "readme.md").read_text()
    said: list[str] = []
    with pytest.MonkeyPatch.context() as environment, ExitStack() as servers:
        for variable, value in exported(text):
            environment.setenv(variable, value)
        for command in commands(text):
            if "pull" in command:
                continue  # the fixture has put the model there; the test of the scaffold pulls it
            if is_server(command):
                servers.enter_context(running(command, folder))
            else:
                said.append(run(command, folder))
        yield "".join(said)


def is_server(command: list[str]) -> bool:
    return command[1] == "-m" and command[-1] != "--help" and (command[3] == "up" or command[3:5] == ["swarm", "start"])


def follow(name: str, into: Path, prepare: Callable[[Path], None] = lambda folder: None) -> tuple[Path, str]:
    """:func:`following` in a copy of the tutorial ``name``, to its end; ``prepare`` is called with the copy.

    Returns:
        The copy of its folder, and what the commands said.
    """
    folder = tutorial_copy(name, into)
    prepare(folder)
    with following(folder) as said:
        pass
    return folder, said


def exported(readme: str) -> list[tuple[str, str]]:
    """The variables that a readme's ``sh`` blocks export."""
    blocks = re.findall(r"```sh\n(.*?)```", readme, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("export ")]
    return [(name, value) for line in lines for name, value in re.findall(r"(\w+)=(\S+)", line)]


def quick_alone(name: str) -> list[list[str]]:
    """The ``--quick`` commands of the ``bash`` blocks whose scripts start what they need: those that are in no ``sh``
    block, which has servers for them."""
    text = readme_of(name)
    served = {command[1] for command in commands(text)}
    return [one for one in commands(text, "bash") if "--quick" in one and one[1] not in served]


def wrong_commands(name: str) -> list[str]:
    """The commands, in all blocks, that the scripts and the command line refuse, each with what they say of it."""
    text, folder = readme_of(name), folder_of(name)
    return [
        f"{' '.join(arguments)}: {wrong}"
        for _, *arguments in [*commands(text), *commands(text, "bash")]
        if (wrong := _refused(arguments[2:]) if arguments[0] == "-m" else _refused_by_script(folder, *arguments))
    ]


class _Parsed(BaseException):
    """A script has read its arguments."""


def _refused_by_script(folder: Path, script: str, *arguments: str) -> str:
    """What the ``argparse`` of a script says of ``arguments``; the script is run up to there."""
    file = folder / script
    if not file.is_file():
        return "there is no such script"
    if not arguments:
        return ""
    if not re.search(r"argparse|from study\.users", file.read_text()):
        return "it has no options"
    parse_args, said = argparse.ArgumentParser.parse_args, io.StringIO()

    def parse(*given: Any) -> None:
        parse_args(*given)
        raise _Parsed

    modules = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [str(file), *arguments])
        patch.syspath_prepend(folder)
        try:
            runpy.run_path(str(file), run_name="__main__")
        except _Parsed:
            return ""
        except SystemExit:
            return said.getvalue().strip().splitlines()[-1]
        finally:
            # the next script has its own files of the same names
            for one in set(sys.modules) - modules:
                if Path(getattr(sys.modules[one], "__file__", None) or "").is_relative_to(folder):
                    del sys.modules[one]
    return "it did not read its arguments"


def _refused(arguments: list[str]) -> str:
    """What the command line says of ``arguments``, which are not run."""
    command: Any = get_command(app)
    context = command.make_context("swarm-gateway", list(arguments), resilient_parsing=True)
    try:
        while hasattr(command, "resolve_command"):
            name, command, arguments = command.resolve_command(context, arguments)
            if hasattr(command, "resolve_command"):
                context = command.make_context(name, list(arguments), parent=context, resilient_parsing=True)
        if "--help" not in arguments:
            command.make_context(command.name, list(arguments), parent=context)
    except Exception as exc:
        return str(exc) or type(exc).__name__
    return ""
