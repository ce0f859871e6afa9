"""The form of a gateway's log lines: text, or one JSON object a line with the request it is about.

Invariant: no line holds words of users or models unless that is enabled. An exception may quote them (a hook's
``KeyError``, an engine's "invalid value"), so it is logged by its type and place; code that logs an exception passes
the exception itself, never its message. Secrets are never logged.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from gateway.observability.request import current, trace_id
from gateway.observability.scrubbing import text_without_secrets
from swarm.errors import CONTEXT_LENGTH, ConfigError, HookError, SwarmGatewayError, UnavailableError

#: Characters of an error's message within a line.
_LONGEST = 1000
#: What begins a line, or commands a terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TextFormatter(logging.Formatter):
    """One line of text, and an error's traceback below it. With ``texts`` messages of exceptions are logged, but for
    those of requests whose texts may not be kept."""

    def __init__(self, texts: bool = False) -> None:
        super().__init__(TEXT_FORMAT)
        self._texts = texts

    def format(self, record: logging.LogRecord) -> str:
        line = logging.makeLogRecord(record.__dict__)
        line.msg, line.args, line.exc_info, line.exc_text = _harmless(self.message_of(record)), None, None, None
        text = super().format(line)
        error = "\n".join(map(_harmless, self.error_of(record).split("\n")))
        return f"{text}\n{error}" if error else text

    @property
    def _quotes(self) -> bool:
        return self._texts and ((request := current()) is None or request.texts)

    def message_of(self, record: logging.LogRecord) -> str:
        """The message, without secrets."""
        args: Any = record.args
        if not self._quotes and isinstance(args, tuple):
            args = tuple(_described(arg) if isinstance(arg, BaseException) else arg for arg in args)
        return text_without_secrets(str(record.msg) % args if args else str(record.msg))

    def error_of(self, record: logging.LogRecord) -> str:
        """The traceback of the line's exception, without secrets."""
        exc = record.exc_info[1] if record.exc_info else None
        if exc is None:
            return ""
        text = self.formatException((type(exc), exc, exc.__traceback__)) if self._quotes else "\n".join(_lines(exc))
        return text_without_secrets(text)


class JsonFormatter(TextFormatter):
    """``time`` (UTC), ``level``, ``logger``, ``message``; ``request_id``, ``trace_id`` and ``route`` of the request;
    ``error`` with its traceback; and the line's ``extra={"fields": {...}}``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.message_of(record),
        }
        if (request := current()) is not None:
            line["request_id"] = request.request_id
            line |= {name: text for name, text in (("trace_id", trace_id()), ("route", request.route)) if text}
        line |= getattr(record, "fields", {})
        if error := self.error_of(record):
            line["error"] = error
        return json.dumps(line, ensure_ascii=False, default=str)


def _harmless(text: str) -> str:
    """``text``, which may be a caller's or another server's, on one line."""
    return _CONTROL.sub(lambda control: control[0].encode("unicode_escape").decode(), text.rstrip("\n"))


def _described(exc: BaseException) -> str:
    """The message of ``exc`` if it cannot quote a user, else its type and those of its causes."""
    if isinstance(exc, HookError) and exc.public_message:
        return exc.public_message[:_LONGEST]
    return str(exc)[:_LONGEST] if _quotes_nobody(exc) else " from ".join(map(_kind, _chain(exc)))


def _quotes_nobody(exc: BaseException) -> bool:
    if isinstance(exc, SwarmGatewayError) and exc.code == CONTEXT_LENGTH:
        # it holds lengths and settings
        return True
    # messages of the system name files, and a prompt may name a hook's files
    return isinstance(exc, ConfigError | UnavailableError) or (isinstance(exc, OSError) and current() is None)


def _kind(exc: BaseException) -> str:
    """Its type, its code, and the place where it was raised."""
    parts = [str(exc.code)] if isinstance(exc, SwarmGatewayError) and exc.code else []
    if frames := traceback.extract_tb(exc.__traceback__):
        parts.append(f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}")
    return type(exc).__qualname__ + (f" ({', '.join(parts)})" if parts else "")


def _lines(exc: BaseException) -> Iterator[str]:
    """The lines of a traceback without the messages of its exceptions."""
    for error in _chain(exc):
        if error.__traceback__ is not None:
            yield "Traceback (most recent call last):"
            yield "".join(traceback.format_tb(error.__traceback__)).rstrip("\n")
        yield _harmless(f"{type(error).__qualname__}: {error}") if _quotes_nobody(error) else _kind(error)
        if isinstance(error, BaseExceptionGroup):
            for member in error.exceptions:
                yield from _lines(member)


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """``exc`` and its causes."""
    seen: set[int] = set()
    error: BaseException | None = exc
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ if error.__cause__ is not None or error.__suppress_context__ else error.__context__
