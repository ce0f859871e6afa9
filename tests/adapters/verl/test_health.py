"""Telling a dead vLLM from a slow one, and which nodes of a cluster are there."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from adapters.verl import health
from adapters.verl.health import (
    CONNECT_TIMEOUT,
    DEAD_AFTER,
    INTERVAL,
    SILENT_AFTER,
    HealthWatch,
    NodeWatch,
    Outcome,
    ask,
    ask_node,
    missing_cluster,
    missing_nodes,
    sample_token,
)
from swarm.errors import EngineError


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


@pytest.fixture
def raylet() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def address(raylet: socket.socket) -> str:
    return f"127.0.0.1:{raylet.getsockname()[1]}"


def node(raylet: socket.socket, **changes: Any) -> dict[str, Any]:
    here = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": raylet.getsockname()[1]}
    return {**here, "Alive": True, "Resources": {"GPU": 1.0, "CPU": 4.0}, **changes}


def test_a_node_whose_raylet_is_killed_is_gone_and_a_busy_one_is_not(raylet: socket.socket) -> None:
    # nobody accepts what the kernel has taken
    assert ask_node(address(raylet)) == ("well", "")
    clock = iter(range(100))
    watch = HealthWatch([address(raylet)], ask_node, clock=lambda: float(next(clock)), name="node")
    watch.check()
    assert not watch.death and not watch.failing()
    gone = address(raylet)
    raylet.close()
    assert watch.failing() == f"the node at {gone} refuses connections"
    while not watch.death:
        watch.check()
    assert watch.death.startswith(f"the node at {gone} refuses connections for ")


def test_a_node_is_missed_within_ten_seconds_whether_it_refuses_or_is_silent() -> None:
    rounds = 2 + DEAD_AFTER // (INTERVAL + CONNECT_TIMEOUT)
    assert rounds * (INTERVAL + CONNECT_TIMEOUT) < 9.5


def test_a_run_on_several_nodes_is_watched_once_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[list[str]] = [[], ["10.0.0.2:1"]]
    monkeypatch.setattr(health, "_raylets_of_run", lambda wanted: known.pop(0))
    started: list[HealthWatch] = []
    monkeypatch.setattr(HealthWatch, "__enter__", lambda self: started.append(self) or self)
    NodeWatch(1).check()
    watch = NodeWatch(2)
    watch.check()
    assert not watch.failing() and not started
    watch.check()
    watch.check()
    assert len(started) == 1 and not known
    started[0].death = "the node at 10.0.0.2:1 cannot be reached"
    with pytest.raises(EngineError, match=started[0].death):
        watch.check()


def test_a_run_waits_for_its_cluster_and_for_nodes_with_room(raylet: socket.socket) -> None:
    assert not missing_cluster(address(raylet))
    assert not missing_cluster("auto"), "Ray finds it"
    with socket.create_server(("127.0.0.1", 0)) as other:
        both = [node(raylet), node(other)]
        assert not missing_nodes(both, wanted=2, devices=1)
        assert missing_nodes(both, wanted=2, devices=2).startswith("0 of 2 nodes with 2 accelerator(s)")
        assert missing_nodes([node(raylet), node(other, Resources={"CPU": 4.0})], 2, 1).startswith("1 of 2")
        assert missing_nodes([node(raylet), node(other, Alive=False)], 2, 1).startswith("1 of 2")
    assert missing_nodes(both, 2, 1).startswith("1 of 2"), "Ray does not know yet that it died"
    assert missing_cluster(f"127.0.0.1:{both[1]['NodeManagerPort']}").endswith("refuses connections")
