"""The request log: every request and its response, one JSON object a line, in files that rotate by size.

Invariant: of a request whose texts may not be kept there is a line without them; secrets are removed before anything is
written; only the owner may read the files; a disk that is slow or full costs lines (counted), never a request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gateway.config.gateway import MOST_FILES, RequestLogConfig
from gateway.observability.request import RequestRecord, trace_id
from gateway.observability.scrubbing import readable_body
from swarm.errors import ConfigError
from swarm.files import append_line, beside, nearest, replace_file
from swarm.types import Notes

logger = logging.getLogger(__name__)

#: Bounds of what waits for the disk.
_MAX_LINES, _MAX_BYTES = 1000, 64 * 1024 * 1024
_CLOSE_SECONDS = 5.0
#: Seconds between two looks for lines that are too old.
_AGE_SECONDS = 60.0


class RequestLog:
    """Writes in a thread of its own, from :meth:`start` to :meth:`close`.

    Attributes:
        lost: lines that were not written.
    """

    def __init__(self, config: RequestLogConfig) -> None:
        self._config = config
        self._lines: queue.SimpleQueue[dict[str, Any] | Erasure | None] = queue.SimpleQueue()
        # one is counted by the event loop's thread, the other by the writer's
        self._put_bytes = self._taken_bytes = 0
        self.lost = 0
        #: when lines that are too old were looked for
        self._looked = -math.inf
        self._thread = threading.Thread(target=self._write_all, name="request-log", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def request_over(self, record: RequestRecord) -> None:
        """Write a request and its response; does not wait."""
        asked, answer = (bytes(record.request), bytes(record.response)) if record.texts else (b"", b"")
        size = len(asked) + len(answer)
        if self._lines.qsize() >= _MAX_LINES or self._put_bytes - self._taken_bytes + size > _MAX_BYTES:
            self.lost += 1
            return
        self._put_bytes += size
        self._lines.put(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "request_id": record.request_id,
                "trace_id": trace_id(),
                "key": record.key,
                "user": record.user,
                "session": record.session if record.texts else "",
                "route": record.route,
                "policy": record.policy,
                "method": record.method,
                "path": record.path,
                "status": record.status,
                "outcome": record.outcome,
                "error": record.error_code,
                "left_out": record.left_out if record.texts else [],
                "seconds": round(record.seconds, 4),
                "request": asked,
                "answer": answer,
            }
        )

    async def erase(self, notes_fit: Callable[[Notes], bool]) -> int:
        """Take the lines of requests with such notes out of all files; how many there were.

        Raises:
            OSError: a file cannot be read or written.
        """

        def fit(line: dict[str, Any], size: int) -> bool:
            return notes_fit(Notes(**{name: line.get(name, "") for name in ("key", "user", "session", "request_id")}))

        erasure = Erasure(fit)
        self._lines.put(erasure)
        return await asyncio.wrap_future(erasure.lines)

    def close(self) -> None:
        """Write the lines that wait, within five seconds; blocks."""
        self._lines.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error("the request log is too slow: %d lines are lost", self.lost + self._lines.qsize())

    def _write_all(self) -> None:
        failing = False
        with suppress(OSError):
            for path in _files(self._config.path, self._config.files):
                # a kill left it
                beside(path).unlink(missing_ok=True)
            for path in _files(self._config.path, MOST_FILES)[self._config.files :]:
                # of a configuration that kept more: no deletion would find it
                path.unlink(missing_ok=True)
        while (line := self._next()) is not None:
            if isinstance(line, Erasure):
                line.run(_files(self._config.path, self._config.files))
                continue
            self._taken_bytes += len(line["request"]) + len(line["answer"])
            try:
                self._write(self._text(line))
                failing = False
            except OSError as exc:
                self.lost += 1
                if not failing:
                    logger.error("the request log %s cannot be written: %s", self._config.path, exc.strerror or exc)
                failing = True

    def _next(self) -> dict[str, Any] | Erasure | None:
        """What is to be done next: a line, or lines that are too old or too many."""
        keep, routes = self._config.keep_seconds, self._config.keep_routes
        if keep is None and not routes:
            return self._lines.get()
        ages = [keep, *(route.keep_seconds for route in routes.values())]
        pause = min(_AGE_SECONDS, *(seconds or math.inf for seconds in ages))
        if (due := self._looked + pause - time.monotonic()) > 0:
            with suppress(queue.Empty):
                return self._lines.get(timeout=due)
        self._looked = time.monotonic()
        oldest, of_routes = _before(keep), {name: _before(route.keep_seconds) for name, route in routes.items()}
        room = {name: route.keep_bytes for name, route in routes.items() if route.keep_bytes is not None}
        now = after = _before(0.0)
        youngest = max(oldest, *of_routes.values()) if of_routes else oldest

        def is_young(first: dict[str, Any]) -> bool:
            """Whether nothing is over in a file that begins with ``first``, its oldest line."""
            nonlocal after
            if room or not youngest <= first.get("time", "") <= now:
                return False
            after = first["time"]
            return True

        def is_over(line: dict[str, Any], size: int) -> bool:
            nonlocal after
            route, written = line.get("route", ""), line.get("time", "")
            # what a clock that was ahead has dated came before the next line
            after = written if written <= now else after
            if after < max(oldest, of_routes.get(route, "")):
                return True
            if route in room:
                room[route] -= size
            return room.get(route, 0) < 0

        return Erasure(is_over, is_young)

    def _text(self, line: dict[str, Any]) -> bytes:
        most = self._config.max_text_bytes
        bodies = {name: readable_body(line[name], cut=len(line[name]) >= most) for name in ("request", "answer")}
        return (json.dumps({**line, **bodies}, ensure_ascii=False) + "\n").encode("utf-8", "replace")

    def _write(self, line: bytes) -> None:
        path = self._config.path
        path.parent.mkdir(parents=True, exist_ok=True)
        size = path.stat().st_size if path.exists() else 0
        if size and size + len(line) > self._config.max_bytes:
            _rotate(path, self._config.files)
        elif path.exists():
            # it may be readable by others
            path.chmod(0o600)
        append_line(path, line, durable=False)


class Erasure:
    """Lines to be taken out; it runs in the thread that writes them. ``fit`` gets each line with its bytes, the latest
    first. ``stays`` gets the first line of each file, and says whether the file has none, which is then not read."""

    def __init__(
        self, fit: Callable[[dict[str, Any], int], bool], stays: Callable[[dict[str, Any]], bool] = lambda first: False
    ) -> None:
        self._fit, self._stays = fit, stays
        self.lines: Future[int] = Future()

    def run(self, files: Sequence[Path]) -> None:
        """Replace each file that has some, unless whoever asked has given up; a kill leaves it as it was."""
        if not self.lines.set_running_or_notify_cancel():
            return
        try:
            self.lines.set_result(sum(self._without(path) for path in files if path.exists()))
        except Exception as exc:
            logger.error("lines that are to be deleted stay in %s: %s", files[0], exc)
            self.lines.set_exception(exc)

    def _without(self, path: Path) -> int:
        with path.open("rb") as file:
            with suppress(ValueError, AttributeError):
                if self._stays(json.loads(file.readline())):
                    return 0
            file.seek(0)
            # not split as a whole, during which no request would be answered
            lines = file.readlines()
        kept = [line for line in reversed(lines) if not self._is_of(line)][::-1]
        if len(kept) < len(lines):
            replace_file(path, b"".join(kept))
        return len(lines) - len(kept)

    def _is_of(self, line: bytes) -> bool:
        try:
            return self._fit(json.loads(line), len(line))
        except (ValueError, AttributeError):
            # a kill cut it off, and nobody can tell whose it is
            return True


def check_request_log(config: RequestLogConfig) -> None:
    """Raise :class:`ConfigError` if the file cannot be written, as far as that shows without writing it."""
    path = config.path
    if path.is_dir():
        raise ConfigError(f"request_log: {path} is a folder; name a file in it")
    existing = nearest(path)
    if not (existing == path or existing.is_dir()) or not os.access(existing, os.W_OK):
        raise ConfigError(f"request_log: {path} cannot be written; name a file in a folder that can")


def _before(seconds: float | None) -> str:
    """The time of a line before which it is too old."""
    if seconds is not None:
        with suppress(OverflowError):  # for ever, or nearly so
            return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
    return ""


def _files(path: Path, files: int) -> list[Path]:
    return [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, files))]


def _rotate(path: Path, files: int) -> None:
    """``log`` becomes ``log.1``, that ``log.2``, ...; the oldest of ``files`` is deleted."""
    names = _files(path, files)
    names[-1].unlink(missing_ok=True)
    for newer, older in reversed(list(itertools.pairwise(names))):
        if newer.exists():
            os.replace(newer, older)
