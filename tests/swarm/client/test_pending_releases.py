"""What no server was there to hear is told before the next claim, once, by both clients."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swarm.client import AsyncSwarmClient, RetryPolicy, SwarmClient
from swarm.errors import UnavailableError
from tests.swarm.client.conftest import QUICK
from tests.swarm.client.scripted import DROP, Answer, ScriptedServer
from tests.swarm.client.test_asynchronous import group, until

ONCE = RetryPolicy(attempts=1, base=0.002, cap=0.01)


@pytest.fixture(autouse=True)
def quick_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.client.calls.RELEASE_POLICY", ONCE)


def test_an_abort_that_no_server_hears_is_told_before_the_next_claim(
    server: ScriptedServer, client: SwarmClient
) -> None:
    server.script("/abort_episode", {"success": True})
    server.script("/claim_group", group("c"))
    server.stop()
    client.abort(["a", "b"], "no use")
    server.start()
    client.claim_group(1, 5.0)
    client.claim_group(1, 5.0)
    paths = [one.path for one in server.requests]
    assert paths == ["/abort_episode", "/abort_episode", "/claim_group", "/claim_group"]
    told = server.bodies("/abort_episode")
    assert [(body["episode_uuid"], body["reason"]) for body in told] == [("a", "no use"), ("b", "no use")]


@pytest.mark.anyio
async def test_many_claims_at_once_tell_each_abort_once(server: ScriptedServer) -> None:
    server.script("/abort_episode", {"success": True})
    server.script("/claim_group", group("c"))
    async with AsyncSwarmClient(server.url, client_uuid="me", policy=QUICK) as client:
        server.stop()
        await client.abort([f"e{number}" for number in range(20)])
        server.start()
        await asyncio.gather(*(client.claim_group(1, 5.0) for _ in range(5)))
        told = [body["episode_uuid"] for body in server.bodies("/abort_episode")]
    assert sorted(told[:20]) == sorted(f"e{number}" for number in range(20))


def test_what_is_not_heard_again_stays_owed(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/claim_group", group("c"))
    server.stop()
    client.abort(["a", "b"])
    server.start()
    # one connection that breaks is replaced at once; the second that does is an absence
    server.script("/abort_episode", {"success": True}, DROP, DROP, {"success": True})
    client.claim_group(1, 5.0)
    client.claim_group(1, 5.0)
    assert [body["episode_uuid"] for body in server.bodies("/abort_episode")] == ["a", "b", "b", "b"]


def test_what_the_server_refuses_is_not_said_again(
    server: ScriptedServer, client: SwarmClient, caplog: pytest.LogCaptureFixture
) -> None:
    server.stop()
    client.abort(["a"])
    server.start()
    server.script("/abort_episode", Answer({"error": {"message": "who?"}}, 404))
    server.script("/claim_group", group("c"))
    client.claim_group(1, 5.0)
    client.claim_group(1, 5.0)
    assert len(server.bodies("/abort_episode")) == 1 and "falls to its idle timeout" in caplog.text


def test_a_claim_that_may_have_been_granted_is_withdrawn(server: ScriptedServer) -> None:
    server.script("/withdraw_claim", {"success": True})
    with SwarmClient(server.url, client_uuid="me", policy=ONCE) as client:
        server.script("/claim_group", DROP)
        with pytest.raises(UnavailableError):
            client.claim_group(2, 1.0)
        with pytest.raises(UnavailableError):
            client.claim_group(2, 1.0, idempotency_key="mine, to be asked for again")
        lost = server.bodies("/claim_group")[0]["idempotency_key"]
        server.script("/claim_group", group("a", "b"))
        client.claim_group(2, 5.0)
    assert [body["idempotency_key"] for body in server.bodies("/withdraw_claim")] == [lost]


def test_much_that_is_owed_does_not_hold_a_claim_up(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/abort_episode", {"success": True})
    server.script("/claim_group", group("c"))
    server.stop()
    client.abort([f"e{number}" for number in range(40)])
    server.start()
    client.claim_group(1, 5.0)
    before = [one.path for one in server.requests].index("/claim_group")
    assert 0 < before < 40
    for _ in range(3):
        client.claim_group(1, 5.0)
    assert len(server.bodies("/abort_episode")) == 40


def test_a_closed_client_aborts_without_a_word(server: ScriptedServer, client: SwarmClient) -> None:
    client.close()
    client.abort(["a", "b"])
    assert server.requests == []


@pytest.mark.anyio
async def test_a_cancelled_claim_under_its_callers_key_can_be_asked_for_again(server: ScriptedServer) -> None:
    held = threading.Event()
    server.script("/claim_group", Answer(group("a"), wait=held))
    async with AsyncSwarmClient(server.url, client_uuid="me", policy=QUICK) as client:
        caller = asyncio.ensure_future(client.claim_group(1, 5.0, idempotency_key="mine"))
        await until(lambda: len(server.requests) == 1)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        held.set()
        again = await client.claim_group(1, 5.0, idempotency_key="mine")
    assert [one.episode_uuid for one in again] == ["a"]
    assert {one.path for one in server.requests} == {"/claim_group"}
