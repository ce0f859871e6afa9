"""Deadlines for calls that cannot be interrupted: when one passes, the process ends and leaves the reason in a file.

verl waits without a timeout for Ray calls, and a failed weight sync makes its sender wait for ever; only the end of the
process ends that.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REASON_FILE = "engine-deadline.txt"

#: seconds; boot includes loading a large model from a slow disk
BOOT = 1800.0
#: from the arrival of a batch to its weight sync, with a checkpoint in between
TRAINING = 3600.0
WEIGHT_SYNC = 300.0


@contextmanager
def deadline(seconds: float, what: str, run_dir: Path) -> Iterator[None]:
    """End this process if the body takes longer than ``seconds``; the driver reads why from ``run_dir``."""

    def give_up() -> None:
        reason = f"{what} did not finish within {seconds:.0f} s"
        try:
            print(f"engine: {reason}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=sys.stderr)
            (run_dir / REASON_FILE).write_text(reason)
        finally:
            # also where the disk is full: nothing else ends this process
            os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def forget_deadline(run_dir: Path) -> None:
    """Remove what an earlier run of the same folder left, which would hide why this one ends."""
    (run_dir / REASON_FILE).unlink(missing_ok=True)


def passed_deadline(run_dir: Path) -> str:
    """The reason left by a process that ran into its deadline; empty if none did."""
    try:
        return (run_dir / REASON_FILE).read_text()
    except FileNotFoundError:
        return ""
