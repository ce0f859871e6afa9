"""Watches of the engine's state: once per entry, nothing missed, nothing left behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swarm.client import AsyncSwarmClient, SwarmClient
from swarm.errors import UnavailableError
from swarm.states import EngineState
from swarm.status import ServerStatus
from tests.swarm.client.conftest import QUICK
from tests.swarm.client.scripted import DROP, Answer, ScriptedServer
from tests.swarm.client.test_sync import status

PATIENCE = 30.0
ROLLING, SYNCING, OFFLINE = EngineState.ROLLING, EngineState.WEIGHT_SYNCING, EngineState.OFFLINE


def at(change: int, syncs: int, state: EngineState = ROLLING) -> dict[str, object]:
    return status(state, engine_changes=change, weight_syncs=syncs)


class Calls:
    """Counts calls, and tells when there were so many."""

    def __init__(self) -> None:
        self._count = 0
        self._called = threading.Condition()

    def __call__(self) -> None:
        with self._called:
            self._count += 1
            self._called.notify_all()

    def reached(self, count: int) -> bool:
        with self._called:
            return self._called.wait_for(lambda: self._count >= count, PATIENCE)

    @property
    def count(self) -> int:
        return self._count


def loops() -> list[threading.Thread]:
    """The threads of the clients' event loops."""
    return [one for one in threading.enumerate() if one.name.startswith("asyncio-portal")]


def test_a_callback_is_called_once_per_entry(server: ScriptedServer, client: SwarmClient) -> None:
    # an entry seen, an entry missed, one of a server started anew, and polls in which nothing changes
    server.script(
        "/status",
        at(1, 5),
        at(1, 5),
        at(2, 6, SYNCING),
        at(3, 6),
        DROP,
        at(6, 7),
        Answer({}, 503),
        at(90, 1),
        at(90, 1),
    )
    calls = Calls()
    client.add_entering_weight_sync_callback(calls)
    assert calls.reached(3)
    polled = len(server.requests)
    while len(server.requests) < polled + 3:
        threading.Event().wait(0.005)
    assert calls.count == 3
    client.close()
    assert loops() == []


def test_an_error_of_a_callback_does_not_end_its_watch(
    server: ScriptedServer, client: SwarmClient, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("/status", at(1, 0), at(2, 1, SYNCING), at(3, 2, SYNCING), at(3, 2, SYNCING))
    calls = Calls()

    def fail() -> None:
        calls()
        if calls.count == 1:
            raise ValueError("broken")

    client.add_entering_weight_sync_callback(fail)
    assert calls.reached(2)
    assert "broken" in caplog.text


def test_an_error_of_who_watches_the_state_does_not_end_the_watch(
    server: ScriptedServer, client: SwarmClient, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("/status", at(1, 0), at(2, 1, SYNCING), at(3, 1), at(3, 1))
    calls = Calls()

    def fail(_: object) -> None:
        calls()
        if calls.count == 1:
            raise ValueError("broken")

    with client.watching_status(fail):
        assert calls.reached(2)
    assert "broken" in caplog.text


def test_a_close_does_not_wait_for_the_poll(server: ScriptedServer) -> None:
    held = threading.Event()
    server.script("/status", at(1, 0), Answer(at(1, 0), wait=held))
    client = SwarmClient(server.url, policy=QUICK)
    client.add_entering_weight_sync_callback(lambda: None)
    while len(server.requests) < 2:
        threading.Event().wait(0.002)
    closing = threading.Thread(target=client.close)
    closing.start()
    closing.join(5.0)  # the poll itself would take longer
    assert not closing.is_alive()
    assert loops() == []
    held.set()


def test_a_callback_may_close_the_client(server: ScriptedServer) -> None:
    server.script("/status", at(1, 0), at(2, 1, SYNCING), at(2, 1, SYNCING))
    closed = threading.Event()
    client = SwarmClient(server.url, policy=QUICK)

    def close() -> None:
        client.close()
        closed.set()

    client.add_entering_weight_sync_callback(close)
    assert closed.wait(PATIENCE)
    assert loops() == []


def test_a_server_that_is_away_is_told_when_the_watch_begins(server: ScriptedServer, client: SwarmClient) -> None:
    server.stop()
    with pytest.raises(UnavailableError):
        client.add_entering_weight_sync_callback(lambda: None)


def test_a_token_that_is_refused_for_a_while_does_not_end_the_watch(
    server: ScriptedServer, client: SwarmClient, caplog: pytest.LogCaptureFixture
) -> None:
    refused = Answer({"error": {"message": "unknown token"}}, 401)
    server.script("/status", at(1, 0), refused, refused, at(2, 1, SYNCING), at(2, 1, SYNCING))
    calls = Calls()
    client.add_entering_weight_sync_callback(calls)
    assert calls.reached(1)
    assert caplog.text.count("unknown token") == 1


def test_a_server_that_is_away_is_told_once_though_its_messages_differ(
    server: ScriptedServer, client: SwarmClient, caplog: pytest.LogCaptureFixture
) -> None:
    """As the messages of calls that say how many seconds they tried."""
    away = [Answer({"error": {"message": f"away, {number}"}}, 503) for number in range(3 * QUICK.attempts)]
    server.script("/status", at(1, 0), *away, at(2, 1, SYNCING), at(2, 1, SYNCING))
    calls = Calls()
    client.add_entering_weight_sync_callback(calls)
    assert calls.reached(1)
    assert caplog.text.count("the engine's state is unknown") == 1


def test_a_status_is_watched_inside_a_block(server: ScriptedServer, client: SwarmClient) -> None:
    server.script("/status", at(1, 0), at(2, 0, OFFLINE), at(2, 0, OFFLINE))
    seen = Calls()
    with client.watching_status(lambda status: seen()) as first:
        assert first.engine_changes == 1
        assert seen.reached(1)


@pytest.mark.anyio
async def test_async_callbacks_are_awaited(server: ScriptedServer, anyio_backend: str) -> None:
    server.script("/status", at(1, 0), at(2, 1, SYNCING), at(5, 3, SYNCING), at(5, 3, SYNCING))
    called = asyncio.Semaphore(0)

    async def callback() -> None:
        called.release()

    before = asyncio.all_tasks()
    async with AsyncSwarmClient(server.url, policy=QUICK) as client:
        await client.add_entering_weight_sync_callback(callback)
        async with asyncio.timeout(PATIENCE):
            for _ in range(3):
                await called.acquire()
    assert asyncio.all_tasks() == before


@pytest.mark.anyio
async def test_a_watch_that_no_server_hears_begins_once_one_answers(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("/status", *[DROP] * 12, at(1, 5), at(2, 6, SYNCING), at(2, 6, SYNCING))
    seen: list[int] = []
    both = asyncio.Event()

    async def callback(status: ServerStatus) -> None:
        seen.append(status.weight_syncs)
        if len(seen) == 2:
            both.set()

    async with AsyncSwarmClient(server.url, policy=QUICK) as client:
        watch = asyncio.create_task(client.engine.watch(callback))
        async with asyncio.timeout(PATIENCE):
            await both.wait()
        watch.cancel()
    assert seen == [5, 6] and "the engine's state is unknown" in caplog.text


@pytest.mark.parametrize("targets", [(ROLLING,), (OFFLINE, ROLLING)])
def test_waiting_for_states_names_the_last_change_and_does_not_pause(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, targets: tuple[EngineState, ...]
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("swarm.client.calls.Calls.pause", lambda *args: pauses.append(1))
    boot, post = EngineState.BOOTING, EngineState.ROLLING_POST
    server.script("/status", at(7, 0, boot), at(8, 0, post), at(9, 0, SYNCING), at(10, 0))
    with SwarmClient(server.url, policy=QUICK) as client:
        assert client.wait_for_state(*targets, wait_seconds=PATIENCE).engine.engine_status is ROLLING
    assert pauses == []
    assert len(server.requests) == 4
    assert [query(one.query) for one in server.requests] == [None, "7", "8", "9"]


def query(text: str) -> str | None:
    fields = dict(part.split("=") for part in text.split("&"))
    return fields.get("after_change")
