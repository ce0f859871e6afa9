"""What no server was there to hear is told when it is back."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from swarm.client import AsyncSwarmClient, RetryPolicy, SwarmClient
from swarm.client.calls import MOST_RELEASES, RELEASE_POLICY
from swarm.errors import RequestError, UnavailableError
from swarm.protocol import BATCH_WAITS, NO_EPISODES
from tests.ports import free_ports
from tests.swarm.client.conftest import QUICK
from tests.swarm.client.scripted import DROP, Answer, ScriptedServer
from tests.swarm.client.test_asynchronous import group, until

ONCE = RetryPolicy(attempts=1, base=0.002, cap=0.01)


@pytest.fixture(autouse=True)
def quick_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.client.asynchronous.ABORT_SECONDS", 0.05)
    monkeypatch.setattr("swarm.client.calls.RELEASE_POLICY", replace(RELEASE_POLICY, base=0.002, cap=0.01))


@pytest.mark.anyio
async def test_aborts_that_no_server_hears_are_told_once_it_is_back(server: ScriptedServer) -> None:
    server.script("/abort_episode", DROP, DROP, {"success": True})
    uuids = [f"e{number}" for number in range(20)]
    server.stop()
    [server.port] = free_ports(1)
    async with AsyncSwarmClient(server.url, client_uuid="me", policy=QUICK) as client:
        await client.abort(uuids, "no use")
        server.start()
        await until(lambda: len(server.bodies("/abort_episode")) == 22)
    told = server.bodies("/abort_episode")
    assert {body["reason"] for body in told} == {"no use"}
    assert {body["episode_uuid"] for body in told} == set(uuids)


@pytest.mark.anyio
async def test_a_server_that_hangs_is_told_a_few_at_once(server: ScriptedServer) -> None:
    held = threading.Event()
    server.script("/abort_episode", *(Answer({"success": True}, wait=held) for _ in range(40)))
    async with AsyncSwarmClient(server.url, client_uuid="me", policy=QUICK) as client:
        await client.abort([f"e{number}" for number in range(40)])
        await until(lambda: len(server.requests) == MOST_RELEASES)
        with pytest.raises(RequestError):
            await client.status()
        assert len(server.bodies("/abort_episode")) == MOST_RELEASES
        held.set()
        await until(lambda: len(server.bodies("/abort_episode")) == 40)


def test_what_the_server_refuses_is_not_said_again(
    server: ScriptedServer, client: SwarmClient, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("/abort_episode", Answer({"error": {"message": "who?"}}, 404))
    client.abort(["a"])
    client.close()
    assert len(server.bodies("/abort_episode")) == 1 and "falls to its idle timeout" in caplog.text


def test_a_claim_that_may_have_been_granted_is_withdrawn(server: ScriptedServer) -> None:
    server.script("/withdraw_claim", {"success": True})
    server.script("/claim_group", DROP)
    with SwarmClient(server.url, client_uuid="me", policy=ONCE) as client:
        with pytest.raises(UnavailableError):
            client.claim_group(2, 1.0)
        with pytest.raises(UnavailableError):
            client.claim_group(2, 1.0, idempotency_key="mine, to be asked for again")
    lost = server.bodies("/claim_group")[0]["idempotency_key"]
    assert [body["idempotency_key"] for body in server.bodies("/withdraw_claim")] == [lost]


def test_a_claim_that_got_nothing_is_withdrawn_as_a_repetition_of_it_may_arrive_late(server: ScriptedServer) -> None:
    server.script("/withdraw_claim", {"success": True})
    none = {"success": False, "client_uuid": "me", "fail_cause": NO_EPISODES}
    server.script("/claim_group", none | {"fail_cause": BATCH_WAITS}, none)
    with SwarmClient(server.url, client_uuid="me", policy=ONCE) as client:
        # a gateway's requests are refused at once by the hundred, and so is who polls without a wait
        for wait, key, gives_way in ((9, None, True), (0.01, None, False), (0, None, False), (0.01, "again", False)):
            with pytest.raises(UnavailableError):
                client.claim_group(2, wait, idempotency_key=key, unless_batch_waits=gives_way)
    _, waited, _, _ = dict.fromkeys(body["idempotency_key"] for body in server.bodies("/claim_group"))
    assert [body["idempotency_key"] for body in server.bodies("/withdraw_claim")] == [waited]


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
