"""``AsyncSwarmClient`` over real sockets: groups, cancellation, and aborts that are carried through."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from swarm.client import AsyncSwarmClient
from swarm.errors import RequestError, StateError, UnavailableError
from swarm.http.client import Answer as HttpAnswer
from swarm.http.client import HttpClient
from swarm.protocol import POST_ROLLING
from swarm.states import EngineState
from swarm.types import WorkflowOutput
from tests.swarm.client.conftest import QUICK
from tests.swarm.client.scripted import DROP, Answer, ScriptedServer
from tests.swarm.client.test_sync import engine, not_yet

pytestmark = pytest.mark.anyio

PATIENCE = 30.0


def group(*uuids: str) -> dict[str, Any]:
    episodes = [
        {"episode_uuid": uuid, "openai_base_url": f"http://10.9.8.7:1/episodes/{uuid}/v1", "openai_api_key": "key"}
        for uuid in uuids
    ]
    return {"success": True, "client_uuid": "me", "episodes": episodes}


@pytest.fixture
async def client(server: ScriptedServer, anyio_backend: str) -> AsyncIterator[AsyncSwarmClient]:
    async with AsyncSwarmClient(server.url, client_uuid="me", policy=QUICK) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - the scripted server lives in another thread
            await asyncio.sleep(0.002)


async def test_a_claim_without_patience_tries_once(server: ScriptedServer, client: AsyncSwarmClient) -> None:
    server.script("/claim_group", not_yet(POST_ROLLING))
    with pytest.raises(UnavailableError, match="could not claim 4 episodes within 0 s") as caught:
        await client.claim_group(4)
    assert caught.value.code == "engine_post_rolling"
    assert len(server.requests) == 1


async def test_why_a_claim_failed_is_asked_when_the_phrase_is_unknown(
    server: ScriptedServer, client: AsyncSwarmClient
) -> None:
    server.script("/claim_group", not_yet("something new"))
    server.script("/get_engine_status", engine(EngineState.BOOTING))
    with pytest.raises(UnavailableError) as caught:
        await client.claim_group(1)
    assert caught.value.code == "engine_booting"


async def test_many_are_aborted_and_nothing_is_raised(
    server: ScriptedServer, client: AsyncSwarmClient, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = Answer({"error": {"message": "unknown"}}, 404)
    server.script("/abort_episode", {"success": True}, unknown, DROP, {"success": True})
    await client.abort(["a", "b", "c"])
    await client.abort([])
    await client.abort("whole")
    assert {body["episode_uuid"] for body in server.bodies("/abort_episode")} == {"a", "b", "c", "whole"}
    assert caplog.text.count("falls to its idle timeout") == 1


async def test_an_abort_goes_on_when_its_caller_is_cancelled(server: ScriptedServer, client: AsyncSwarmClient) -> None:
    held = threading.Event()
    server.script("/abort_episode", Answer(wait=held, drop=True), {"success": True})
    caller = asyncio.ensure_future(client.abort(["a"]))
    await until(lambda: len(server.requests) == 1)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    held.set()
    # the reply was lost; the abort is repeated though nobody waits for it
    await until(lambda: len(server.requests) == 2)


async def test_a_claim_that_was_given_up_is_withdrawn_with_what_it_is_granted_and_not_polled_again(
    server: ScriptedServer, client: AsyncSwarmClient
) -> None:
    held = threading.Event()
    server.script("/claim_group", Answer(group("a", "b"), wait=held))
    server.script("/withdraw_claim", {"success": True})
    caller = asyncio.ensure_future(client.claim_group(2, 60.0))
    await until(lambda: len(server.requests) == 1)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await until(lambda: len(server.requests) == 2)
    held.set()
    await client.close()
    assert [one.path for one in server.requests] == ["/claim_group", "/withdraw_claim"]
    [claimed], [withdrawn] = server.bodies("/claim_group"), server.bodies("/withdraw_claim")
    assert {"client_uuid": "me", "idempotency_key": claimed["idempotency_key"]} == withdrawn


class Turns(HttpClient):
    """Answers in memory, so that the turns of the loop can be counted; grants a claim once told to."""

    def __init__(self) -> None:
        super().__init__()
        self.claimed, self.granting = asyncio.Event(), asyncio.Event()
        self.key = ""
        self.withdrawn: list[str] = []

    async def request(self, method: str, url: str, content: bytes | None, *_: Any, **__: Any) -> HttpAnswer:
        body: dict[str, Any] = {"success": True}
        if url.endswith("/claim_group"):
            self.key = json.loads(content or b"")["idempotency_key"]
            self.claimed.set()
            await self.granting.wait()
            body = group("a", "b")
        elif url.endswith("/withdraw_claim"):
            self.withdrawn.append(json.loads(content or b"")["idempotency_key"])
        return HttpAnswer(200, {}, json.dumps(body).encode())


@pytest.mark.parametrize("turns", range(6))
async def test_a_claim_granted_just_as_the_client_is_closed_is_withdrawn(turns: int) -> None:
    http = Turns()
    client = AsyncSwarmClient("http://127.0.0.1:1", client_uuid="me", http=http)
    caller = asyncio.ensure_future(client.claim_group(2, 5.0))
    await http.claimed.wait()
    http.granting.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    had_them = caller.done()
    await client.close()
    if had_them:
        assert (await caller).episode_uuids
        return
    with pytest.raises(StateError, match="this client is closed"):
        await caller
    assert http.withdrawn == [http.key]


async def test_close_is_bounded(
    server: ScriptedServer, client: AsyncSwarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.client.calls.CLOSE_GRACE", 0.02)
    held = threading.Event()
    server.script("/abort_episode", Answer(wait=held))
    aborting = asyncio.ensure_future(client.abort(["a"]))
    await until(lambda: len(server.requests) == 1)
    async with asyncio.timeout(PATIENCE):
        await client.close()
        await aborting
    held.set()


async def test_a_group_ends_with_a_result_for_each_episode_in_their_order(
    server: ScriptedServer, client: AsyncSwarmClient
) -> None:
    server.script("/claim_group", group("a", "b"))
    server.script("/end_group", {"success": True})
    async with client.group(2) as claimed:
        with pytest.raises(RequestError, match="1 results for 2 episodes"):
            await claimed.end("t", [WorkflowOutput(reward=1.0)])
        await claimed.end("t", [WorkflowOutput(reward=1.0), WorkflowOutput(reward=0.5)])
    [body] = server.bodies("/end_group")
    assert [(one["episode_uuid"], one["workflow_output"]["reward"]) for one in body["ends"]] == [("a", 1.0), ("b", 0.5)]
