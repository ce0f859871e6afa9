"""Bodies that come slowly take no more memory than there is for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from starlette.types import Message

from gateway.limits.body_limits import SMALL_BYTES, SMALL_HELD_BYTES, Intake
from swarm.errors import OverloadedError, PayloadTooLargeError
from tests.gateway.conftest import OpenGateway

pytestmark = pytest.mark.anyio
SCOPE: dict[str, Any] = {"headers": []}
CHAT = "/v1/chat/completions"
ASKED = b'{"messages": [{"role": "user", "content": "%s"}]}'


class Sender:
    """A body that is sent part by part."""

    def __init__(self, intake: Intake, most: int = 100, limit: int = 1000, name: str = "") -> None:
        self._parts: asyncio.Queue[Message] = asyncio.Queue()
        self.sent = 0
        self.reading = asyncio.create_task(intake.body(SCOPE, self._parts.get, sender=name, limit=limit, most=most))

    async def send(self, size: int, *, last: bool = False) -> None:
        self.sent += size
        await self._say({"type": "http.request", "body": b"x" * size, "more_body": not last})

    async def leave(self) -> None:
        await self._say({"type": "http.disconnect"})

    async def _say(self, message: Message) -> None:
        self._parts.put_nowait(message)
        for _ in range(5):
            await asyncio.sleep(0)


async def test_whoever_would_take_too_much_is_told_to_come_back() -> None:
    intake = Intake(small=0)
    slow, other = Sender(intake), Sender(intake)
    await slow.send(80)
    await other.send(20)
    assert intake.held == 100
    await other.send(1)
    with pytest.raises(OverloadedError) as refused:
        await other.reading
    assert refused.value.retry_after and intake.held == 80
    await slow.send(20, last=True)
    assert await slow.reading == b"x" * 100
    assert intake.held == 0


async def test_one_body_alone_may_be_as_long_as_a_body_may_be() -> None:
    intake = Intake(small=0)
    alone = Sender(intake, most=100)
    await alone.send(900)
    await alone.send(100, last=True)
    assert len(await alone.reading) == 1000 and intake.held == 0


@pytest.mark.parametrize("first", [1, SMALL_BYTES])
async def test_a_small_body_is_let_in_whatever_others_send(first: int) -> None:
    intake = Intake()
    large, alone = (Sender(intake, limit=10 * SMALL_BYTES) for _ in range(2))
    await large.send(9 * SMALL_BYTES)
    await alone.send(first)
    await alone.send(SMALL_BYTES - first, last=True)
    assert len(await alone.reading) == SMALL_BYTES
    assert intake.held == 9 * SMALL_BYTES
    await large.leave()
    with pytest.raises(ClientDisconnect):
        await large.reading
    assert intake.held == 0


async def test_one_key_takes_half_of_the_room_and_leaves_the_rest_to_others() -> None:
    intake = Intake(small=0)
    mine = [Sender(intake, name="mine") for _ in range(2)]
    await mine[0].send(30)
    await mine[1].send(20)
    await mine[1].send(1)
    with pytest.raises(OverloadedError):
        await mine[1].reading
    other = Sender(intake, name="other")
    await other.send(50)
    assert intake.held == 80
    # its only one may be larger than that, as long as there is room
    await other.send(0, last=True)
    await (third := Sender(intake, name="other")).send(10)
    await mine[0].send(60, last=True)
    await third.send(0, last=True)
    assert [len(await one.reading) for one in (mine[0], other, third)] == [90, 50, 10]
    assert intake.held == 0


async def test_a_body_that_outgrows_the_small_ones_takes_room_of_the_large() -> None:
    intake = Intake(small=10, small_held=20)
    first, second = Sender(intake), Sender(intake)
    await first.send(10)
    await second.send(10)
    await first.send(81)
    assert intake.held == 101
    # nor is it counted among the small any more
    third = Sender(intake)
    await third.send(10)
    assert intake.held == 111
    await second.send(1)
    with pytest.raises(OverloadedError):
        await second.reading
    assert intake.held == 101
    await first.send(0, last=True)
    await third.send(0, last=True)
    assert (len(await first.reading), len(await third.reading), intake.held) == (91, 10, 0)


async def test_small_bodies_have_a_bound_of_their_own() -> None:
    intake = Intake()
    senders = [Sender(intake, limit=SMALL_BYTES) for _ in range(SMALL_HELD_BYTES // SMALL_BYTES)]
    for sender in senders:
        await sender.send(SMALL_BYTES)
    assert intake.held == SMALL_HELD_BYTES
    more = Sender(intake)
    await more.send(1)
    with pytest.raises(OverloadedError):
        await more.reading
    for sender in senders:
        await sender.send(0, last=True)
    await asyncio.gather(*(sender.reading for sender in senders))
    assert intake.held == 0


@pytest.mark.parametrize("ending", ["leaves", "is too long", "is cancelled"])
async def test_who_is_gone_holds_nothing(ending: str) -> None:
    intake = Intake(small=0)
    sender = Sender(intake, most=5000)
    await sender.send(500)
    if ending == "leaves":
        await sender.leave()
    elif ending == "is too long":
        await sender.send(501)
    else:
        sender.reading.cancel()
    with pytest.raises((ClientDisconnect, PayloadTooLargeError, asyncio.CancelledError)):
        await sender.reading
    assert intake.held == 0


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.booleans()), max_size=40),
    names=st.lists(st.sampled_from(["", "a", "b"]), min_size=4, max_size=4),
)
def test_all_together_never_hold_more(sizes: list[tuple[int, int, bool]], names: list[str]) -> None:
    async def run() -> None:
        intake = Intake(small=0)
        senders = [Sender(intake, name=name) for name in names]
        for number, size, last in sizes:
            before = {name: _held(senders, names, name) for name in names}
            await senders[number].send(size, last=last)
            holding = [sender.sent for sender in senders if sender.sent and not sender.reading.done()]
            assert intake.held == sum(holding)
            assert intake.held <= 100 or len(holding) == 1
            for name in {"a", "b"}.intersection(names):
                held = _held(senders, names, name)
                bodies = [one for one, its in zip(senders, names, strict=True) if its == name and one.sent]
                several = sum(not one.reading.done() for one in bodies) > 1
                assert held <= max(50, before[name]) or not several
        for sender in senders:
            sender.reading.cancel()
        await asyncio.gather(*(sender.reading for sender in senders), return_exceptions=True)
        assert intake.held == 0

    asyncio.run(run())


def _held(senders: list[Sender], names: list[str], name: str) -> int:
    """What the bodies of one key hold, on their way in."""
    return sum(
        sender.sent
        for sender, its in zip(senders, names, strict=True)
        if its == name and sender.sent and not sender.reading.done()
    )


async def test_a_gateway_sends_away_what_it_has_no_room_to_read(open_gateway: OpenGateway) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        whole = ASKED % (b"x" * 150_000)
        yield whole[:140_000]
        begun.set()
        await go.wait()
        yield whole[140_000:]

    async with open_gateway(max_reading_bytes=141_000) as http:
        slow = asyncio.create_task(http.post(CHAT, content=slowly()))
        await begun.wait()

        async def refused() -> bool:
            answer = await http.post(CHAT, content=ASKED % (b"x" * 70_000))
            return answer.status_code == 429 and "retry-after" in answer.headers

        async with asyncio.timeout(60):
            # what was sent may not have come yet
            while not await refused():
                pass
        assert (await http.post(CHAT, content=ASKED % b"hi")).status_code == 200
        go.set()
        assert (await slow).status_code == 200
        assert (await http.post(CHAT, content=ASKED % (b"x" * 70_000))).status_code == 200
