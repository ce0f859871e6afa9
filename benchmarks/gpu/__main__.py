"""Whether this machine trains: install, boot, steps with equal weights, serving meanwhile, shared prefixes, two GPUs.

``python -m benchmarks.gpu`` on a machine with a GPU and the extra ``gpu``; with ``--device cpu`` it makes the same
checks on the CPU set. Real Ray, verl and vLLM, on a random model of 0.3 M parameters. A table goes to stderr, JSON to
stdout; the exit code is 1 if a check failed.

A check that this machine cannot make (two GPUs, say) is skipped with the reason. After a failure those that need what
failed are skipped; all of them end within ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.gpu import checks
from benchmarks.gpu.checks import FailedError, SkippedError


@dataclass
class Row:
    """The outcome of one check; ``found`` is what it measured."""

    check: str
    outcome: Literal["ok", "failed", "skipped"] = "ok"
    seconds: float = 0.0
    why: str = ""
    found: dict[str, Any] = field(default_factory=dict)


class Report:
    """Rows in the order of the checks.

    Args:
        limit: seconds for all of them.
    """

    def __init__(self, limit: float) -> None:
        self.rows: list[Row] = []
        self._until = time.monotonic() + limit

    async def run(self, name: str, check: Callable[[], Awaitable[dict[str, Any]]], needs: str = "") -> None:
        """Make a check, unless the one that it ``needs`` did not pass."""
        row = Row(name)
        self.rows.append(row)
        began = time.monotonic()
        limit: asyncio.Timeout | None = None
        try:
            if any(earlier.check == needs and earlier.outcome != "ok" for earlier in self.rows):
                raise SkippedError(f"needs: {needs}")
            async with asyncio.timeout(max(0.0, self._until - began)) as limit:
                row.found = await check()
        except SkippedError as exc:
            row.outcome, row.why = "skipped", str(exc)
        except TimeoutError:
            late = limit is not None and limit.expired()
            row.outcome, row.why = "failed", "the time for all checks is over" if late else "the engine did not answer"
        except Exception as exc:
            row.outcome, row.why = "failed", _reason(exc)
        row.seconds = round(time.monotonic() - began, 1)

    def found(self, name: str) -> dict[str, Any]:
        """What a check measured."""
        return next(row.found for row in self.rows if row.check == name)

    def table(self) -> Table:
        """For people."""
        table = Table("check", "outcome", "s", "found")
        for row in self.rows:
            found = ", ".join(f"{key} {value}" for key, value in row.found.items())
            table.add_row(row.check, row.outcome, f"{row.seconds:.0f}", row.why or found)
        return table


def _reason(exc: BaseException) -> str:
    """One line for people."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    text = next(iter(str(exc).strip().splitlines()), "")
    return text if isinstance(exc, FailedError) else f"{type(exc).__name__}: {text}"


async def check_all(device: str, limit: float, folder: Path) -> Report:
    """Make all checks; each of them only if the one that it needs has passed."""
    report = Report(limit)
    await report.run("install", lambda: checks.install(device))
    runs = checks.Runs(device, folder)
    try:
        await report.run("boot", runs.boot, needs="install")
        await report.run("three steps", runs.steps, needs="boot")
        await report.run("serving meanwhile", runs.serving, needs="three steps")
        await report.run("stop", runs.stop, needs="boot")
        await report.run("shared prefixes", runs.shared_prefixes, needs="three steps")
        gpus = len(report.found("install").get("GPUs", []))
        await report.run("two GPUs", lambda: runs.two_devices(gpus), needs="three steps")
    finally:
        await runs.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for all checks (default: 600)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep models, logs and checkpoints there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-") as temporary:
        report = asyncio.run(check_all(options.device, options.limit, options.keep or Path(temporary)))
    Console(stderr=True).print(report.table())
    print(json.dumps({"device": options.device, "checks": [asdict(row) for row in report.rows]}, indent=1))
    sys.exit(any(row.outcome == "failed" for row in report.rows))


if __name__ == "__main__":
    main()
