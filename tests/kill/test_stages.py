"""A SIGKILL in the midst of a move leaves one side serving, the same at each gateway, and no user sees an error.

Four kills; ``python -m tests.kill --stages 20`` for all transitions, and for how long a rollback takes.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.kill.stages import SUCCESSION, killing

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

TRANSITIONS = [("to the canary", "server"), ("to live", "gateway"), ("rollback", "server"), (SUCCESSION, "gateway")]


async def test_a_kill_in_the_midst_of_a_move_leaves_one_side_serving(tmp_path: Path) -> None:
    report = await killing(tmp_path, random.randrange(2**32), rollbacks=1, points=1, transitions=TRANSITIONS)
    assert report["violations"] == [] and report["errors"] == 0, report
    # it was a test: both died, both sides answered, and the rollback was everybody's
    assert report["kills"] == {"server": 2, "gateway": 2} and report["rollbacks"] == 1, report
    assert set(report["sources"]) == {"challenger", "incumbent"} and report["answers"] > 100, report
