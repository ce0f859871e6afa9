"""That nothing is left of what a test started."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from contextlib import contextmanager

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
                one.kill()
            # what failed in the block is the reason, and is not to be hidden by what it left
            assert failed or not told, f"left behind: {told}"
