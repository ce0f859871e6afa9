"""Why a trainer ended, in one line for people: a deadline that passed; the cause inside the errors of Ray, hydra and
verl; and what vLLM's core died of, read from the engine's log: the core is a process of its own, and tells its HTTP
server no more than that it is dead. On GPUs its workers are, too, and tell it no more than that they did not start.

verl waits without a timeout for Ray calls, and a failed weight sync makes its sender wait for ever: only the end of the
process ends that, which leaves the reason in a file. The log is read as vLLM 0.24 to 0.28 write it: the lines of each
carry its process and their level, and a fatal error is announced in the line before its traceback.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError, EngineError, SwarmGatewayError
from swarm.link.imported import CODE_VARIABLE

_KEY_OF_HYDRA = re.compile(r"\nfull_key: \S*\s*$")
#: Seconds within which Ray brings the last lines of a dead process to the driver's output.
LAG = 5.0
_MOST = 500
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"\((?P<process>(?:EngineCore|Worker)\w* pid=\d+)\) ERROR [^\[]*\[[^\]]*\] ?(?P<text>.*)")
#: where a process that ran into its deadline leaves the reason, in the run folder
REASON_FILE = "engine-deadline.txt"
#: seconds; boot includes loading a large model from a slow disk
BOOT = 1800.0
#: from the arrival of a batch to its weight sync, with a checkpoint in between
TRAINING = 3600.0
WEIGHT_SYNC = 300.0
_FATAL = ("EngineCore encountered a fatal error", "EngineCore failed to start", "WorkerProc failed to start")


class VllmDiedError(EngineError):
    """No trainer can go on with the vLLM of this run."""


def is_final(exc: BaseException) -> bool:
    """Whether another trainer would end alike: vLLM died, or the job is at fault."""
    # Ray's errors are of the class of their cause, too
    return isinstance(exc, ConfigError) or isinstance(innermost(exc), VllmDiedError)


def innermost(exc: BaseException) -> BaseException:
    """The innermost cause of ``exc``, through Ray's wrappers."""
    import ray.exceptions

    seen: set[int] = set()
    current: Any = exc
    while id(current) not in seen:
        seen.add(id(current))
        inner = getattr(current, "cause", None) if isinstance(current, ray.exceptions.RayTaskError) else None
        following = inner or current.__cause__
        if not isinstance(following, BaseException):
            break
        current = following
    return current


def root_cause(exc: BaseException) -> str:
    """One line for people: the innermost cause of ``exc``."""
    current = innermost(exc)
    if isinstance(current, SwarmGatewayError):
        return current.message
    if isinstance(current, ModuleNotFoundError) and os.environ.get(CODE_VARIABLE):
        return (
            f"the synced code needs the Python module {current.name!r}, which is not installed on {platform.node()}: "
            f"install it there for {sys.executable}; code sync sends no dependencies"
        )
    # hydra names the key last, and the cause before it
    text = _KEY_OF_HYDRA.sub("", str(current)).strip() or "no message"
    # of CUDA's, all that follows is advice
    leads = isinstance(current, EngineError) or text.startswith("CUDA error")
    return f"{type(current).__name__}: {text.splitlines()[0 if leads else -1]}"


def core_exception(log: Path, start: int = 0, within: float = 0.0) -> str:
    """The first exception of vLLM's core in ``log`` from the byte ``start`` on, in one line; empty if there is none
    within so many seconds."""
    until = time.monotonic() + within
    while not (exception := _first(log, start)) and time.monotonic() < until:
        time.sleep(0.1)
    return exception


def _first(log: Path, start: int) -> str:
    fatal, tracing = set[str](), set[str]()
    try:
        with log.open("rb") as lines:
            # it may have been cut meanwhile
            lines.seek(start if start <= lines.seek(0, os.SEEK_END) else 0)
            for line in lines:
                match = _LINE.search(_COLOUR.sub("", line.decode(errors="replace")))
                if match is None:
                    continue
                process, text = match["process"], match["text"].rstrip()
                if text.startswith(_FATAL):
                    fatal.add(process)
                elif process in fatal and text.startswith("Traceback (most recent call last)"):
                    tracing.add(process)
                elif process in tracing and text and not text[0].isspace():
                    return text[:_MOST]
    except OSError:
        pass
    return ""


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
