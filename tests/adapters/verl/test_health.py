"""Telling a dead vLLM from a slow one."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from adapters.verl import health
from adapters.verl.health import DEAD_AFTER, SILENT_AFTER, HealthWatch, Outcome, ask, sample_token


class Server(HTTPServer):
    """An HTTP server that answers ``/health`` with the status at hand."""

    status = 200

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def leave(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server) and self.path == "/health"
        self.send_response(self.server.status)
        self.end_headers()

    def do_POST(self) -> None:
        assert isinstance(self.server, Server) and self.path == "/v1/completions"
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert (asked["model"], asked["max_tokens"]) == ("tiny", 1)
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(b"the core is dead" if self.server.status == 500 else b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as opened:
        thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_replica_can_sample_or_says_why_not(server: Server) -> None:
    assert sample_token(server.address, "tiny") == ""
    server.status = 500
    assert sample_token(server.address, "tiny") == "answered 500 to a first prompt: the core is dead"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert sample_token(address, "tiny", timeout=0.05) == "did not answer a first prompt (TimeoutError)"


def test_what_a_replica_does_is_told_apart(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(server.address) == ("well", "")
    server.status = 503
    assert ask(server.address) == ("dead", "answers 503 to /health")
    monkeypatch.setattr(health, "ANSWER_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert ask(f"127.0.0.1:{mute.getsockname()[1]}")[0] == "silent"


def test_a_server_that_goes_away_is_dead_after_some_seconds(server: Server) -> None:
    clock = Clock()
    watch = HealthWatch([server.address], clock=clock)
    watch.check()
    assert watch.death == ""
    server.leave()
    for _ in range(int(DEAD_AFTER)):
        watch.check()
        assert watch.death == ""
        clock.now += 1.0
    watch.check()
    assert watch.death == f"the replica at {server.address} refuses connections for 4 s"


@pytest.mark.parametrize(
    ("script", "dies"),
    [
        ("d" * 4, False),
        ("d" * 5, True),
        ("dddwdddd", False),
        ("dddsdddd", False),
        ("s" * int(SILENT_AFTER), False),
        ("s" * int(SILENT_AFTER + 1), True),
        ("s" * 50 + "w" + "s" * 50, False),
    ],
)
def test_death_is_a_row_of_failures(script: str, dies: bool) -> None:
    clock = Clock()
    outcomes: dict[str, tuple[Outcome, str]] = {
        "d": ("dead", "refuses connections"),
        "s": ("silent", "does not answer"),
        "w": ("well", ""),
    }
    answers = iter(script)
    watch = HealthWatch(["a:1"], ask=lambda _: outcomes[next(answers)], clock=clock)
    for _ in script:
        watch.check()
        clock.now += 1.0
    assert bool(watch.death) == dies


def test_one_dead_replica_of_two_is_enough_and_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "INTERVAL", 0.001)
    monkeypatch.setattr(health, "DEAD_AFTER", 0.0)
    asked: list[str] = []

    def answer(address: str) -> tuple[Outcome, str]:
        asked.append(address)
        return ("dead", "is gone") if address == "b:2" else ("well", "")

    with HealthWatch(["a:1", "b:2"], ask=answer) as watch:
        watch._thread.join(timeout=10)
        assert watch.death == "the replica at b:2 is gone for 0 s"
    assert asked == ["a:1", "b:2"]
