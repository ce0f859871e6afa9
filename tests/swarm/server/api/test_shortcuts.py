"""Shortcuts over a real socket: they answer as the application does, and leave to it whatever is not plain."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import anyio.lowlevel
import httpx
import pytest
import uvicorn

from swarm.credentials import TokenFile
from swarm.http.serve import bind, uvicorn_config
from swarm.http.shortcuts import Shortcuts, ShortRequest
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.journal.writer import Writer
from tests.swarm.server.conftest import JOB, ready

pytestmark = pytest.mark.anyio

TOKEN = "let-me-in"
#: the shortcut's, and the application's: a query is not plain
PATHS = ("/claim_episode", "/claim_episode?")
#: headers that differ from answer to answer
OWN = ("date", "x-request-id", "content-length")


class Server:
    """A rolling server with its shortcuts; ``taken`` says of each request that they saw whether they answered it."""

    def __init__(self, controller: Controller, client: httpx.AsyncClient) -> None:
        self.controller = controller
        self.client = client
        self.taken: list[bool] = []

    def watched(self, shortcuts: Shortcuts) -> Shortcuts:
        def watch(path: str) -> Any:
            def shortcut(request: ShortRequest) -> bool:
                self.taken.append(shortcuts[path](request))
                return self.taken[-1]

            return shortcut

        return {path: watch(path) for path in shortcuts}

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def claim(self, **more: Any) -> dict[str, Any]:
        answer = (await self.post("/claim_episode", {"client_uuid": "me", "episode_type": "eval"} | more)).json()
        assert answer["success"], answer
        return answer

    async def eventually(self, condition: Callable[[], bool]) -> None:
        """Give way to the server until ``condition`` holds."""
        async with asyncio.timeout(10):
            while not condition():
                await anyio.lowlevel.checkpoint()

    async def both(self, path: str, body: dict[str, Any], **headers: str) -> tuple[httpx.Response, httpx.Response]:
        """The answers to a request by the shortcut, if it takes it, and by the application: a query is not plain."""
        return await self.post(path, body, **headers), await self.post(f"{path}?", body, **headers)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Server]:
    app = create_app(ServerConfig(run_dir=tmp_path, token=TOKEN))
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(
        base_url=url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=20, trust_env=False
    ) as client:
        server = Server(app.state.controller, client)
        shortcuts = server.watched(app.state.shortcuts)
        running = uvicorn.Server(uvicorn_config(app, shutdown_seconds=2, log_level="warning", shortcuts=shortcuts))
        task = asyncio.create_task(running.serve(sockets=[listener]))
        await client.get("/health")
        server.controller.sync_job(JOB)
        server.controller.boot()
        server.controller.rollout_ready(ready("127.0.0.1:1"))
        try:
            yield server
        finally:
            running.should_exit = True
            await task


def end_of(episode: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "client_uuid": "me",
        "episode_uuid": episode["episode_uuid"],
        "task_id": "task",
        "workflow_output": {"reward": 1.0},
    } | more


async def test_claims_are_answered_as_by_the_application(server: Server) -> None:
    body = {"client_uuid": 'me "é"', "episode_type": "eval", "idempotency_key": "k"}
    short, long = await server.both("/claim_episode", body, **{"x-request-id": "mine"})
    assert server.taken == [True]
    # a repeated claim gets the same episode, so nothing may differ
    assert short.content == long.content
    assert short.json()["openai_base_url"].startswith(str(server.client.base_url))
    assert short.headers["x-request-id"] == long.headers["x-request-id"] == "mine"
    assert {n: v for n, v in short.headers.items() if n not in OWN} == {
        n: v for n, v in long.headers.items() if n not in OWN
    }


async def test_ends_are_answered_as_by_the_application(server: Server) -> None:
    # a train episode without a call cannot be trained, which its end is told
    for kind, error in (("eval", None), ("train", "not trained: ")):
        episode = await server.claim(episode_type=kind)
        server.taken.clear()
        short, long = await server.both("/end_episode", end_of(episode, idempotency_key="k"))
        assert server.taken == [True]
        assert short.content == long.content
        assert short.json()["success"] and (short.json()["error"] or "").startswith(error or "")
        assert short.headers["x-request-id"].startswith("req_")


async def test_groups_are_claimed_as_by_the_application(server: Server) -> None:
    body = {"client_uuid": "me", "count": 3, "idempotency_key": "k", "standby": True}
    short, long = await server.both("/claim_group", body)
    assert server.taken == [True]
    assert short.content == long.content
    assert len({one["openai_api_key"] for one in short.json()["episodes"]}) == 3
    assert short.json()["openai_base_url"] == f"{server.client.base_url}/groups/{short.json()['group_uuid']}/v1"


async def test_groups_are_ended_as_by_the_application(server: Server) -> None:
    for kind, error in (("eval", None), ("train", "not trained: ")):
        claim = {"client_uuid": "me", "count": 2, "episode_type": kind}
        episodes = (await server.post("/claim_group", claim)).json()["episodes"]
        body = {"client_uuid": "me", "task_id": "task", "ends": [end_of(one) for one in episodes]}
        server.taken.clear()
        short, long = await server.both("/end_group", body)
        assert server.taken == [True]
        assert short.content == long.content
        assert (short.json()["error"] or "").startswith(error or "")
        assert server.controller.pool.running == 0


async def test_a_group_of_which_a_part_is_over_is_the_applications(server: Server) -> None:
    one, other = [await server.claim() for _ in range(2)]
    await server.post("/end_episode", end_of(one))
    body = {"client_uuid": "me", "task_id": "task", "ends": [end_of(one), end_of(other)]}
    server.taken.clear()
    answers = [
        await server.post("/end_group", body | {"ends": [end_of(other)] * 2}),
        await server.post("/end_group", body),
    ]
    assert [answer.status_code for answer in answers] == [400, 200]
    assert server.taken == [False, False] and server.controller.pool.running == 0


async def test_a_group_that_can_never_begin_is_the_applications(server: Server) -> None:
    body = {"client_uuid": "me", "count": JOB.slots + 1}
    short, long = await server.both("/claim_group", body)
    assert short.status_code == 400 and short.content == long.content
    assert server.taken == [False] and server.controller.pool.running == 0


async def test_nobody_is_answered_before_it_is_on_disk(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, may_commit = Writer._commit, threading.Event()

    def held(self: Writer, rows: Any) -> bool:
        assert may_commit.wait(10)
        return commit(self, rows)

    episode = await server.claim()
    monkeypatch.setattr(Writer, "_commit", held)
    asked = [asyncio.create_task(server.claim()), asyncio.create_task(server.post("/end_episode", end_of(episode)))]
    await server.eventually(lambda: server.taken == [True] * 3)
    # longer than an answer that does not wait would take: one that goes through the application is there
    assert (await server.client.get("/health")).status_code == 200
    assert not any(task.done() for task in asked)
    may_commit.set()
    await asyncio.wait_for(asyncio.gather(*asked), 10)


async def test_an_end_that_was_answered_is_repeated_and_another_comes_too_late(server: Server) -> None:
    episode = await server.claim()
    answers = [await server.post("/end_episode", end_of(episode, idempotency_key=key)) for key in ("a", "a", "b")]
    assert [answer.status_code for answer in answers] == [200, 200, 409]
    assert answers[0].content == answers[1].content
    assert answers[2].json()["error"]["code"] == "episode_ended"
    # only the first was the shortcut's
    assert server.taken == [True, True, False, False]


async def test_who_may_claim_is_decided_each_time(server: Server, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path)
    key = {"authorization": f"Bearer {tokens.create('ci', ['claim'])}"}
    body = {"client_uuid": "ci's", "episode_type": "eval", "idempotency_key": "same"}
    # the first may be answered before the server looks at its tokens again; after the second its head is known
    async with asyncio.timeout(30):
        for _ in range(2):
            while (await server.post("/claim_episode", body, **key)).status_code == 401:
                pass
        tokens.revoke("ci")
        while (answer := await server.post("/claim_episode", body, **key)).status_code == 200:
            pass
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "token_revoked")
    other = await server.post("/claim_episode", body, authorization=f"Bearer {TOKEN}")
    assert other.status_code == 200, "the server's own token is an admin's"


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"client_uuid": "me"}, {"authorization": "Bearer wrong"}, 401),
        ({"client_uuid": "me"}, {"authorization": ""}, 401),
        ({"client_uuid": "me"}, {"content-type": "text/plain"}, 415),
        ({"client_uuid": ""}, {}, 400),
        ({"client_uuid": "me", "wait_seconds": float("nan")}, {}, 400),
        ({"client_uuid": "me", "unknown": "\ud800"}, {}, 400),
    ],
)
async def test_refusals_are_the_applications(
    server: Server, body: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    content = json.dumps(body).encode()
    given = {"content-type": "application/json"} | headers
    answers = [await server.client.post(path, content=content, headers=given) for path in PATHS]
    assert [answer.status_code for answer in answers] == [status, status]
    assert answers[0].content == answers[1].content
    assert server.taken == [False]
    assert server.controller.pool.running == 0


async def test_a_proxys_request_is_the_applications(server: Server) -> None:
    answer = await server.post("/claim_episode", {"client_uuid": "me"}, **{"x-forwarded-proto": "https"})
    assert answer.json()["openai_base_url"].startswith("https://")
    assert server.taken == [False]


async def test_a_claim_that_must_wait_is_the_applications(server: Server) -> None:
    episodes = [await server.claim() for _ in range(JOB.slots)]
    waiter = asyncio.create_task(server.claim(wait_seconds=30))
    await server.eventually(lambda: len(server.controller.claims) == 1)
    await server.post("/end_episode", end_of(episodes[0]))
    assert (await asyncio.wait_for(waiter, 10))["episode_uuid"]
    assert server.taken == [*[True] * JOB.slots, False, True]


async def test_a_disk_that_does_not_answer_is_told_and_unkeyed_claims_go_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.server.journal.journal.SYNC_SECONDS", 0.05)
    monkeypatch.setattr("swarm.server.journal.writer.Writer._commit", lambda self, rows: self._give_up.wait(1))
    answer = await server.post("/claim_episode", {"client_uuid": "me", "episode_type": "eval"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "journal_unavailable"
    assert answer.headers["x-should-retry"] == "true" and answer.headers["x-request-id"]
    assert server.controller.pool.running == 0
    assert server.taken == [True]


async def test_requests_are_counted_once_each(server: Server) -> None:
    episode = await server.claim()
    await server.post("/end_episode", end_of(episode))
    await server.post("/end_episode", end_of(episode))
    text = (await server.client.get("/metrics")).text
    counts = [
        line.rsplit(" ", 1)[1] for line in text.splitlines() if 'route="/end_episode"' in line and "_total{" in line
    ]
    assert [float(count) for count in counts] == [2.0]


async def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    host, port = server.client.base_url.host, server.client.base_url.port
    reader, writer = await asyncio.open_connection(host, port)
    body = b'{"client_uuid":"me","episode_type":"eval"}'
    head = (
        f"POST /claim_episode HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write((head.encode() + body) * 2 + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    async with asyncio.timeout(10):
        received = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert received.count(b"HTTP/1.1 200 OK") == 3
    assert received.rindex(b'"episode_uuid"') < received.index(b'{"status":"ok"}')
    assert server.taken == [True]


async def test_a_body_in_pieces_is_put_together(server: Server) -> None:
    host, port = server.client.base_url.host, server.client.base_url.port
    reader, writer = await asyncio.open_connection(host, port)
    body = b'{"client_uuid":"me","episode_type":"eval"}'
    head = f"POST /claim_episode HTTP/1.1\r\nhost: x\r\nx-api-key: {TOKEN}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body[:10])
    await writer.drain()
    await asyncio.sleep(0)
    writer.write(body[10:])
    async with asyncio.timeout(10):
        received = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert b'"success":true' in received and b"connection: close" in received
    assert server.taken == [True]
