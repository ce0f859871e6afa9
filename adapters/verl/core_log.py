"""What vLLM's core died of, read from the engine's log: the core is a process of its own, and tells its HTTP server no
more than that it is dead. On GPUs its workers are, too, and tell it no more than that they did not start.

Written against vLLM 0.24 to 0.28: the lines of each carry its process and their level, and a fatal error is announced
in the line before its traceback.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

#: Seconds within which Ray brings the last lines of a dead process to the driver's output.
LAG = 5.0
_MOST = 500
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"\((?P<process>(?:EngineCore|Worker)\w* pid=\d+)\) ERROR [^\[]*\[[^\]]*\] ?(?P<text>.*)")
_FATAL = ("EngineCore encountered a fatal error", "EngineCore failed to start", "WorkerProc failed to start")


def core_exception(log: Path, start: int = 0, within: float = 0.0) -> str:
    """The first exception of vLLM's core in ``log`` from the byte ``start`` on, in one line; empty if there is none
    within so many seconds."""
    deadline = time.monotonic() + within
    while not (exception := _first(log, start)) and time.monotonic() < deadline:
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
