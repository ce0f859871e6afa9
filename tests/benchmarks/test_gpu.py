"""The report of the checks of a GPU machine; `python -m benchmarks.gpu --device cpu` runs the checks themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.gpu.__main__ import Report
from benchmarks.gpu.checks import SkippedError, hold

pytestmark = pytest.mark.anyio


async def fine() -> dict[str, Any]:
    return {"seconds": 3}


async def wrong() -> dict[str, Any]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(60))
        hold(False, "2 is not 3\nand more lines")
    return {}


async def not_here() -> dict[str, Any]:
    raise SkippedError("1 GPU here")


async def endless() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


async def silent() -> dict[str, Any]:
    raise TimeoutError


async def test_what_needs_a_failed_check_is_skipped_and_nothing_outlasts_the_limit() -> None:
    report = Report(limit=60.0)
    await report.run("a", fine)
    await report.run("b", wrong, needs="a")
    await report.run("c", fine, needs="b")
    await report.run("d", not_here, needs="a")
    await report.run("e", silent)
    assert [(row.outcome, row.why) for row in report.rows] == [
        ("ok", ""),
        ("failed", "2 is not 3"),
        ("skipped", "needs: b"),
        ("skipped", "1 GPU here"),
        ("failed", "the engine did not answer"),
    ]
    assert report.found("a") == {"seconds": 3}
    assert report.table().row_count == 5
    late = Report(limit=0.01)
    await late.run("endless", endless)
    assert (late.rows[0].outcome, late.rows[0].why) == ("failed", "the time for all checks is over")
