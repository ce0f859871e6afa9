"""The processes that a test started, and that nothing is left of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.engine.engine_process import processes_with, title

_MARK = "STARTED_IN"


@contextmanager
def nothing_left_behind(seconds: float = 0.0) -> Generator[None]:
    """Within ``seconds`` after the block every process that was started in it has ended, whoever its parent is by then:
    each inherits a variable, by which it is found. Those that have not are killed, and fail the test, unless the block
    has failed already.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(_MARK, mark := uuid.uuid4().hex)
        failed = True
        try:
            yield
            failed = False
        finally:
            environment.undo()
            _, left = psutil.wait_procs(processes_with(_MARK, mark), seconds)
            told = [title(one) for one in left]
            for one in left:
                # it may be ending by itself
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            # what failed in the block is the reason, and is not to be hidden by what it left
            assert failed or not told, f"left behind: {told}"


def alive(pid: int) -> bool:
    """Whether a process lives: one that has ended may be there until somebody asks how, and gone at the next look."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children(*words: str, of: int | None = None) -> dict[psutil.Process, list[str]]:
    """The living children of this process, or of the process ``of``, that have these words in their command; each with
    its command.
    """
    commands: dict[psutil.Process, list[str]] = {}
    deadline = time.monotonic() + 30
    for child in psutil.Process(of).children():
        # any of them may end between two looks
        with suppress(psutil.NoSuchProcess):
            # `exec` writes the command last
            while not (command := child.cmdline()):
                assert time.monotonic() < deadline, child
                time.sleep(0.001)
            if set(words) <= set(command):
                commands[child] = command
    return commands
