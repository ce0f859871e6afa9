"""Both ends of the engine link over a real socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from swarm.errors import LinkError
from swarm.link.engine import EngineEnd
from swarm.link.messages import (
    BatchReady,
    BootProgress,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Role,
    RolloutReady,
    Stop,
    decode,
    encode,
)
from swarm.link.server import EngineLink
from swarm.tokens import TrainBatch, TrainGroup
from tests.token_data import timeline, trajectory

pytestmark = pytest.mark.anyio
TOKEN = "secret"


@pytest.fixture
async def link() -> AsyncIterator[EngineLink]:
    async with EngineLink(TOKEN) as server:
        yield server


async def receive(link: EngineLink, seconds: float = 5.0) -> tuple[Role, Message]:
    async with asyncio.timeout(seconds):
        return await link.receive()


async def hello(link: EngineLink) -> Hello:
    _, message = await receive(link)
    assert isinstance(message, Hello)
    return message


def batch(trajectories: int, tokens: int) -> TrainBatch:
    line = timeline(range(tokens), [1] * tokens)
    members = [trajectory(line, episode_uuid=str(i)) for i in range(trajectories)]
    return TrainBatch(batch_id="b", groups=[TrainGroup(task_id="t", trajectories=members)])


async def test_messages_arrive_in_order_with_their_role(link: EngineLink) -> None:
    with EngineEnd("driver", link.address, TOKEN) as driver, EngineEnd("rollout", link.address, TOKEN) as rollout:
        greeted = {(await receive(link))[0], (await receive(link))[0]}
        assert greeted == {"driver", "rollout"} == link.roles
        for stage in "abc":
            driver.send(BootProgress(stage=stage))
        assert [(await receive(link))[1] for _ in "abc"] == [BootProgress(stage=stage) for stage in "abc"]
        ready = RolloutReady(addresses=["127.0.0.1:1"], model="m", policy_version=3, next_step=4)
        rollout.send(ready)
        assert await receive(link) == ("rollout", ready)


async def test_server_addresses_one_role(link: EngineLink) -> None:
    with EngineEnd("driver", link.address, TOKEN) as driver, EngineEnd("rollout", link.address, TOKEN) as rollout:
        await hello(link)
        await hello(link)
        await link.send("rollout", Stop())
        assert await asyncio.to_thread(rollout.receive, 60.0) == Stop()
        assert driver.receive(0) is None


async def test_large_batch_arrives_unchanged(link: EngineLink) -> None:
    sent = batch(trajectories=64, tokens=2000)
    with EngineEnd("rollout", link.address, TOKEN) as rollout:
        await hello(link)
        await link.send("rollout", BatchReady(batch=sent))
        assert await asyncio.to_thread(rollout.receive, 20.0) == BatchReady(batch=sent)


async def test_sending_to_an_absent_role_is_an_error(link: EngineLink) -> None:
    with pytest.raises(LinkError, match="not connected"):
        await link.send("rollout", Stop())


async def test_wrong_token_is_dropped(link: EngineLink) -> None:
    with EngineEnd("driver", link.address, "guess") as intruder:
        intruder.send(Goodbye(error="ha"))
        with EngineEnd("driver", link.address, TOKEN) as driver:
            driver.send(BootProgress(stage="real"))
            assert isinstance((await receive(link))[1], Hello)
            assert await receive(link) == ("driver", BootProgress(stage="real"))


async def test_second_process_of_a_role_is_dropped(link: EngineLink) -> None:
    with EngineEnd("driver", link.address, TOKEN) as first:
        await hello(link)
        with EngineEnd("driver", link.address, TOKEN) as second:
            second.send(Goodbye(error="impostor"))
            # the socket serves peers fairly: after the impostor's close nothing of it is left
        first.send(BootProgress(stage="still here"))
        assert await receive(link) == ("driver", BootProgress(stage="still here"))


async def test_malformed_frames_and_messages_before_hello_are_dropped(link: EngineLink) -> None:
    context = zmq.asyncio.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(link.address)
    try:
        await raw.send(b"\xff\x00 no msgpack")
        await raw.send_multipart([b"two", b"frames"])
        await raw.send(encode(BootProgress(stage="before hello")))
        await raw.send(encode(Hello(role="driver", token=TOKEN, pid=1)))
        await raw.send(encode(BootProgress(stage="after hello")))
        await hello(link)
        assert await receive(link) == ("driver", BootProgress(stage="after hello"))
    finally:
        raw.close(linger=0)
        context.term()


async def test_silent_role_is_reported_once() -> None:
    async with EngineLink(TOKEN, heartbeat_timeout=0.2) as link:
        with EngineEnd("rollout", link.address, TOKEN, heartbeat_interval=60.0) as rollout:
            await hello(link)
            with pytest.raises(TimeoutError):
                # it imports what holds its interpreter
                await receive(link, seconds=0.3)
            rollout.send(RolloutReady(policy_version=0, next_step=1, addresses=["127.0.0.1:1"], model="m"))
            await receive(link)
            with pytest.raises(LinkError, match=r"rollout has been silent for 0\.\d s"):
                await receive(link)
            assert link.roles == frozenset()
            with pytest.raises(TimeoutError):
                await receive(link, seconds=0.3)


async def test_heartbeats_keep_a_role_alive() -> None:
    async with EngineLink(TOKEN, heartbeat_timeout=0.5) as link:
        with EngineEnd("driver", link.address, TOKEN, heartbeat_interval=0.05):
            await hello(link)
            with pytest.raises(TimeoutError):
                await receive(link, seconds=1.2)
            assert link.roles == {"driver"}


async def test_silence_after_finished_is_no_error() -> None:
    async with EngineLink(TOKEN, heartbeat_timeout=0.1) as link:
        with EngineEnd("driver", link.address, TOKEN) as driver:
            await hello(link)
            driver.send(Goodbye())
        assert await receive(link) == ("driver", Goodbye())
        with pytest.raises(TimeoutError):
            await receive(link, seconds=0.3)


async def test_close_delivers_what_was_sent(link: EngineLink) -> None:
    with EngineEnd("driver", link.address, TOKEN) as driver:
        driver.send(Goodbye(error="the last word"))
    await hello(link)
    assert await receive(link) == ("driver", Goodbye(error="the last word"))


async def test_engine_learns_that_the_server_is_lost() -> None:
    lost = threading.Event()
    link = EngineLink(TOKEN)
    async with link:
        end = EngineEnd("driver", link.address, TOKEN, heartbeat_interval=0.05, server_timeout=0.5, on_lost=lost.set)
        await hello(link)
        assert not end.lost
    try:
        assert await asyncio.to_thread(lost.wait, 60.0)
        assert end.lost
    finally:
        end.close()


async def test_engine_ignores_frames_that_it_cannot_read() -> None:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        with EngineEnd("driver", f"tcp://127.0.0.1:{port}", TOKEN) as end:
            identity, frame = await router.recv_multipart()
            assert decode(frame) == Hello(role="driver", token=TOKEN, pid=decode(frame).pid)  # type: ignore[union-attr]
            await router.send_multipart([identity, b"junk"])
            await router.send_multipart([identity, encode(Heartbeat())])
            await router.send_multipart([identity, encode(Stop())])
            assert await asyncio.to_thread(end.receive, 60.0) == Stop()
    finally:
        router.close(linger=0)
        context.term()


def test_from_environment_needs_a_server() -> None:
    with pytest.raises(LinkError, match="started by the swarm server"):
        EngineEnd.from_environment("driver", {})


async def test_the_last_words_of_processes_that_are_gone_are_heard(link: EngineLink) -> None:
    with EngineEnd("driver", link.address, TOKEN) as driver:
        await hello(link)
        for stage in "abc":
            driver.send(BootProgress(stage=stage))
    assert await link.last_words(60.0) == [BootProgress(stage=stage) for stage in "abc"]
    assert await link.last_words(60.0) == []


async def test_the_last_words_are_waited_for_only_so_long(link: EngineLink) -> None:
    with EngineEnd("driver", link.address, TOKEN) as driver:
        await hello(link)
        driver.send(BootProgress(stage="a"))
        assert await receive(link)
        assert await link.last_words(0.01) == []
