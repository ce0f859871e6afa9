"""Lines of the log: their form, and that nobody's words are in them unless they are asked for."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

from gateway.observability.logs import JsonFormatter, TextFormatter
from gateway.observability.request import Metrics, RequestRecord, recording
from swarm.errors import HookError, UnavailableError

TRACE = "0af7651916cd43dd8448eb211c80319c"


def record(message: str, *args: Any, **more: Any) -> logging.LogRecord:
    return logging.LogRecord("gateway.x", logging.WARNING, "x.py", 1, message, args, more.pop("exc_info", None))


def raised(raise_it: Callable[[], None]) -> Any:
    try:
        raise_it()
    except BaseException:
        return sys.exc_info()


#: a traceback quotes lines of code, and these words stand in none
WORDS = "the user's words"


def failing() -> None:
    try:
        raise KeyError(WORDS)
    except KeyError as exc:
        raise HookError(f"hook failed on {WORDS}", code="hook_raised") from exc


def test_a_line_of_json_says_which_request_it_is_about() -> None:
    request = RequestRecord("req_1", Metrics(), traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
    request.route = "mine"
    with recording(request):
        line = json.loads(JsonFormatter().format(record("group %s is late\nby much", 7)))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "gateway.x",
        "message": "group 7 is late\nby much",
        "request_id": "req_1",
        "trace_id": TRACE,
        "route": "mine",
    }


def test_a_line_outside_of_a_request_names_none() -> None:
    assert set(json.loads(JsonFormatter().format(record("news")))) == {"time", "level", "logger", "message"}


def test_a_line_of_text_has_time_level_and_name() -> None:
    assert TextFormatter().format(record("%d%%", 5))[4:].endswith(" WARNING gateway.x: 5%")


def test_a_text_of_others_begins_no_line_and_commands_no_terminal() -> None:
    # a route that a client names, and what an upstream says of its 503
    text = TextFormatter().format(
        record("route %s: shadow", "a\n2026 ERROR gateway.x: forged\x1b]0;owned\x07\x9b2J\u2028b")
    )
    assert text.endswith(r"route a\n2026 ERROR gateway.x: forged\x1b]0;owned\x07\x9b2J\u2028b: shadow")
    error = UnavailableError("busy\n2026 ERROR\x1b[2J", code="upstream_busy")
    lines = TextFormatter().format(record("late: %s", error, exc_info=(type(error), error, None)))
    assert lines.endswith("\n" + r"UnavailableError: busy\n2026 ERROR\x1b[2J")


def test_a_message_that_ends_its_line_ends_no_other() -> None:
    assert (
        TextFormatter()
        .format(record("Exception in ASGI application\n"))
        .endswith("gateway.x: Exception in ASGI application")
    )


@pytest.mark.parametrize("kind", [TextFormatter, JsonFormatter])
def test_an_exception_is_told_by_kind_and_place(kind: type[TextFormatter]) -> None:
    info = raised(failing)
    given = record("no rewards: %s", info[1], exc_info=info)
    text = kind().format(given)
    assert "no rewards: HookError (hook_raised, test_logs.py:" in text and "from KeyError (test_logs.py:" in text
    assert "in failing" in text and WORDS not in text
    asked = kind(texts=True).format(given)
    assert f"no rewards: hook failed on {WORDS}" in asked and "KeyError" in asked


def test_a_group_of_exceptions_is_told_member_by_member() -> None:
    def fail() -> None:
        raise ExceptionGroup("words", [ValueError("words"), KeyError("words")])

    lines = TextFormatter().format(record("failed", exc_info=raised(fail))).splitlines()
    kinds = [line.split(" ")[0] for line in lines[1:] if not line.startswith(" ")]
    assert kinds == ["Traceback", "ExceptionGroup", "ValueError", "KeyError"]


def test_what_cannot_quote_a_user_is_told_in_its_words() -> None:
    assert TextFormatter().format(record("%s", UnavailableError("it is down"))).endswith(": it is down")
    full = OSError(28, "No space left on device")
    assert TextFormatter().format(record("%s", full)).endswith("No space left on device")
    with recording(RequestRecord("req_1", Metrics())):
        # a hook's file may be named by a prompt
        assert TextFormatter().format(record("%s", full)).endswith(": OSError")


def test_a_secret_is_in_no_line() -> None:
    for kind in (TextFormatter, JsonFormatter):
        text = kind(texts=True).format(record("key %s at %s", "sk-swarm-0123456789ab-abcdefgh", "http://u:pw@host/v1"))
        assert "sk-swarm" not in text and "pw" not in text and "@host/v1" in text


def test_one_handler_does_not_change_what_the_next_one_gets() -> None:
    given = record("no rewards: %s", ValueError("words"))
    TextFormatter().format(given)
    assert given.getMessage() == "no rewards: words"
