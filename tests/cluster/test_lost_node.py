"""A node dies under load: users are answered on, and training goes on from the last checkpoint once it is back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml

from swarm.client import SwarmClient
from swarm.states import EngineState
from tests.cluster.ray_nodes import RayNode
from tests.engine import tiny_model
from tests.engine.test_gateway_loop import ASK, HOOKS, READY_SECONDS, STEP_SECONDS, until
from tests.up_process import Up

pytestmark = pytest.mark.cluster
pytest.importorskip("verl", reason="needs the cpu extra")

USERS = 2
UPSTREAM = "from the upstream"
NOTICE_SECONDS = 10.0


class Fixed(BaseHTTPRequestHandler):
    """Answers every chat request alike."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": UPSTREAM}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "big", "choices": [choice]}
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Fixed) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


class Users:
    """Each asks again 0.2 s after it had an answer; a context manager.

    Attributes:
        answers: when each came (monotonic seconds), its status, who answered, and how long it took.
    """

    def __init__(self, gateway: str) -> None:
        self.answers: list[tuple[float, int, str, float]] = []
        self._gateway = gateway
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(USERS)]

    def _ask(self) -> None:
        with httpx.Client(base_url=self._gateway, timeout=STEP_SECONDS, trust_env=False) as app:
            while not self._done.wait(0.2):
                began = time.monotonic()
                answer = app.post("/v1/chat/completions", json={**ASK, "max_tokens": 16})
                now = time.monotonic()
                who = answer.headers.get("x-swarm-policy-version", "")
                if answer.status_code != 200 or answer.json()["choices"][0]["message"]["content"] == UPSTREAM:
                    who = UPSTREAM if answer.status_code == 200 else answer.text
                self.answers.append((now, answer.status_code, who, now - began))

    def __enter__(self) -> Users:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()


def test_users_are_answered_while_a_node_is_away_and_training_goes_on_when_it_is_back(
    tmp_path: Path, upstream: str, nodes: list[RayNode]
) -> None:
    tiny_model.build(tmp_path / "tiny")
    (tmp_path / "letters.py").write_text(HOOKS)
    sections = {
        "job": {
            "model": "tiny",
            "device": "cpu",
            "nnodes": 2,
            "batch_size": 1,
            "num_repeat": 3,
            "max_prompt_length": 128,
            "max_response_length": 32,
            "lr": 1e-5,
            "save_freq": 1,
        },
        "swarm": {"port": 0, "run_dir": "run", "boot_timeout": READY_SECONDS - 60},
        "gateway": {
            "port": 0,
            "hooks": "letters:hooks",
            "routes": [{"name": "tiny", "upstream": {"base_url": upstream, "model": "big"}}],
        },
    }
    (tmp_path / "up.yaml").write_text(yaml.safe_dump(sections))
    other = nodes[1]
    up = Up(tmp_path / "up.yaml")
    try:
        up.expect("ready", READY_SECONDS)
        with Users(up.url("gateway")) as users, SwarmClient(up.url("swarm server")) as swarm:
            while up.expect("step", STEP_SECONDS)["step"] < 2:
                pass
            other.kill()
            killed = time.monotonic()
            assert until(lambda: swarm.status().engine.engine_status is EngineState.OFFLINE, 60.0), swarm.status()
            noticed = time.monotonic() - killed
            died = up.expect("restarting", 60.0)
            print(f"noticed after {noticed:.1f} s: {died['reason']}")
            assert noticed < NOTICE_SECONDS
            assert "the node at 127.0.0.3:" in died["reason"]
            while up.expect("boot", READY_SECONDS)["stage"] != "waiting for nodes":
                pass
            last = max(one.step for one in swarm.status().steps)
            other.start()
            back = time.monotonic()
            recovered = up.expect("recovered", READY_SECONDS)["step"]
            # a checkpoint is written before its step is told
            assert recovered >= last
            print(f"serves again {time.monotonic() - back:.0f} s after the node is back")
            assert up.expect("step", STEP_SECONDS)["step"] == recovered + 1
            assert len(swarm.status().replicas) == 2
        since = [one for one in users.answers if one[0] >= killed]
        assert {status for _, status, _, _ in users.answers} == {200}, users.answers
        # until the engine is given up, what is left of it answers
        sources = {who for _, _, who, _ in since}
        assert UPSTREAM in sources and len(sources) > 1
        print(f"{len(since)} answers since the kill, the longest took {max(one[3] for one in since):.1f} s")
        assert up.interrupt() in (0, 130)
        assert until(lambda: not up.processes(), 10.0), up.processes()
    finally:
        up.end()
