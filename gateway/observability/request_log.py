"""The request log: every request and its answer, one JSON object a line, in files that are put aside by size.

Invariant: what looks like a secret is removed before anything is written; only the owner may read the files; a disk
that is slow or full costs lines (counted), never a request.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from gateway.config.observability import RequestLogConfig
from gateway.observability.observed import Observed
from gateway.observability.request import trace_id
from gateway.observability.scrubbing import told_body
from swarm.errors import ConfigError

logger = logging.getLogger(__name__)

#: Lines that wait for the disk, and bytes of them.
_WAITING, _WAITING_BYTES = 1000, 64 * 1024 * 1024
_CLOSE_SECONDS = 5.0


class RequestLog:
    """Writes in a thread of its own, from :meth:`start` to :meth:`close`.

    Attributes:
        lost: lines that were not written.
    """

    def __init__(self, config: RequestLogConfig) -> None:
        self._config = config
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        # of the event loop's thread, and of the writer's: each counts what it has done
        self._put_bytes = self._taken_bytes = 0
        self.lost = 0
        self._thread = threading.Thread(target=self._write_all, name="request-log", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def request_over(self, observed: Observed) -> None:
        """Note a request and its answer."""
        seen = observed.seen
        size = len(observed.asked) + len(observed.answer)
        if self._lines.qsize() >= _WAITING or self._put_bytes - self._taken_bytes + size > _WAITING_BYTES:
            self.lost += 1
            return
        self._put_bytes += size
        self._lines.put(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "request_id": seen.request_id,
                "trace_id": trace_id(),
                "route": seen.route,
                "policy": seen.policy,
                "method": observed.method,
                "path": observed.path,
                "status": observed.status,
                "outcome": observed.outcome,
                "error": seen.failed,
                "left_out": seen.left_out,
                "seconds": round(observed.seconds, 4),
                "request": bytes(observed.asked),
                "answer": bytes(observed.answer),
            }
        )

    def close(self) -> None:
        """Write what waits, within five seconds; blocks."""
        self._lines.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error("the request log cannot keep up: %d lines are lost", self.lost + self._lines.qsize())

    def _write_all(self) -> None:
        failing = False
        while (line := self._lines.get()) is not None:
            self._taken_bytes += len(line["request"]) + len(line["answer"])
            try:
                self._write(self._text(line))
                failing = False
            except OSError as exc:
                self.lost += 1
                if not failing:
                    logger.error("the request log %s cannot be written: %s", self._config.path, exc.strerror or exc)
                failing = True

    def _text(self, line: dict[str, Any]) -> bytes:
        most = self._config.max_text_bytes
        told = {name: told_body(line[name], cut=len(line[name]) >= most) for name in ("request", "answer")}
        return (json.dumps({**line, **told}, ensure_ascii=False) + "\n").encode("utf-8", "replace")

    def _write(self, line: bytes) -> None:
        path = self._config.path
        with _opened(path) as file:
            size = file.tell()
            if not size or size + len(line) <= self._config.max_bytes:
                file.write(line)
                return
        _put_aside(path, self._config.files)
        with _opened(path) as file:
            file.write(line)


def check_request_log(config: RequestLogConfig) -> None:
    """Raise :class:`ConfigError` unless the file can be written, as far as that can be told without doing so."""
    path = config.path
    if path.is_dir():
        raise ConfigError(f"request_log: {path} is a folder; name a file in it")
    folder = next((one for one in path.parents if one.exists()), None)
    if folder is None or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"request_log: {path} cannot be written; name a file in a folder that can")


def _opened(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # a file that was there may be open to others
    os.fchmod(descriptor, 0o600)
    file = os.fdopen(descriptor, "ab")
    file.seek(0, os.SEEK_END)
    return file


def _put_aside(path: Path, files: int) -> None:
    """``log`` becomes ``log.1``, that ``log.2``, ...; the oldest goes."""
    for number in range(files - 1, 0, -1):
        newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
        if newer.exists():
            os.replace(newer, path.with_name(f"{path.name}.{number}"))
    if files == 1:
        path.unlink(missing_ok=True)
