"""How a gateway's log looks: lines of text, or one JSON object a line with the request that it is about.

Invariant: what users and models said is in no line unless it is asked for. An exception may quote it (a hook's
``KeyError``, an engine's "invalid value"), so it is told by its kind and place; code that logs one passes the exception
itself, never its message.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from gateway.observability.observed import Observed
from gateway.observability.request import current, trace_id
from gateway.observability.scrubbing import text_without_secrets
from swarm.errors import CONTEXT_LENGTH, ConfigError, SwarmGatewayError, UnavailableError

access = logging.getLogger("gateway.access")

#: characters of what is told of an error amid a line
_LONGEST = 1000
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TextFormatter(logging.Formatter):
    """One line of text, and the trace of an error below it.

    Args:
        texts: whether the words of exceptions are told.
    """

    def __init__(self, texts: bool = False) -> None:
        super().__init__(TEXT_FORMAT)
        self._texts = texts

    def format(self, record: logging.LogRecord) -> str:
        line = logging.makeLogRecord(record.__dict__)
        line.msg, line.args, line.exc_info, line.exc_text = self.message_of(record), None, None, None
        text = super().format(line)
        return f"{text}\n{error}" if (error := self.error_of(record)) else text

    def message_of(self, record: logging.LogRecord) -> str:
        """What the line says, without secrets."""
        args: Any = record.args
        if not self._texts and isinstance(args, tuple):
            args = tuple(_told(arg) if isinstance(arg, BaseException) else arg for arg in args)
        return text_without_secrets(str(record.msg) % args if args else str(record.msg))

    def error_of(self, record: logging.LogRecord) -> str:
        """The trace of the error that the line is about, without secrets."""
        exc = record.exc_info[1] if record.exc_info else None
        if exc is None:
            return ""
        told = self.formatException((type(exc), exc, exc.__traceback__)) if self._texts else "\n".join(_places(exc))
        return text_without_secrets(told)


class JsonFormatter(TextFormatter):
    """``time`` (UTC), ``level``, ``logger``, ``message``; ``request_id``, ``trace_id`` and ``route`` where the line
    belongs to a request; ``error`` with its trace; and what the line's ``extra={"fields": {...}}`` says."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.message_of(record),
        }
        if (seen := current()) is not None:
            line["request_id"] = seen.request_id
            line |= {name: text for name, text in (("trace_id", trace_id()), ("route", seen.route)) if text}
        line |= getattr(record, "fields", {})
        if error := self.error_of(record):
            line["error"] = error
        return json.dumps(line, ensure_ascii=False, default=str)


class AccessLog:
    """One line per request."""

    def request_over(self, observed: Observed) -> None:
        """Log how it went."""
        if not access.isEnabledFor(logging.INFO):
            return
        seen = observed.seen
        # it is the caller's text, and a line must stay one
        path = quote(observed.path)
        fields: dict[str, Any] = {
            "method": observed.method,
            "path": path,
            "status": observed.status,
            "outcome": observed.outcome,
            "policy": seen.policy,
            "seconds": round(observed.seconds, 4),
            "own_seconds": round(max(0.0, observed.seconds - seen.away), 4),
        }
        if observed.first_seconds is not None:
            fields["first_token_seconds"] = round(observed.first_seconds, 4)
        if seen.failed:
            fields["error_code"] = seen.failed
        if seen.left_out:
            fields["left_out"] = seen.left_out
        access.info(
            "%s %s %d %s %.3f s", observed.method, path, observed.status, observed.outcome, observed.seconds,
            extra={"fields": fields},
        )  # fmt: skip


def _told(exc: BaseException) -> str:
    """What may be said of ``exc``: its words where they cannot be a user's, else its kind, and that of what led to
    it."""
    return str(exc)[:_LONGEST] if _quotes_nobody(exc) else " from ".join(map(_kind, _chain(exc)))


def _quotes_nobody(exc: BaseException) -> bool:
    if isinstance(exc, SwarmGatewayError) and exc.code == CONTEXT_LENGTH:
        # it tells lengths and settings
        return True
    # what the system says names files, and a hook's files may be named by a prompt
    return isinstance(exc, ConfigError | UnavailableError) or (isinstance(exc, OSError) and current() is None)


def _kind(exc: BaseException) -> str:
    """Its type, its code, and the place where it was raised."""
    said = [str(exc.code)] if isinstance(exc, SwarmGatewayError) and exc.code else []
    if frames := traceback.extract_tb(exc.__traceback__):
        said.append(f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}")
    return type(exc).__qualname__ + (f" ({', '.join(said)})" if said else "")


def _places(exc: BaseException) -> Iterator[str]:
    """The lines of a traceback without the words of its exceptions."""
    for one in _chain(exc):
        if one.__traceback__ is not None:
            yield "Traceback (most recent call last):"
            yield "".join(traceback.format_tb(one.__traceback__)).rstrip("\n")
        yield f"{type(one).__qualname__}: {one}" if _quotes_nobody(one) else _kind(one)
        if isinstance(one, BaseExceptionGroup):
            for member in one.exceptions:
                yield from _places(member)


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """``exc`` and what led to it."""
    known: set[int] = set()
    one: BaseException | None = exc
    while one is not None and id(one) not in known:
        known.add(id(one))
        yield one
        one = one.__cause__ if one.__cause__ is not None or one.__suppress_context__ else one.__context__
