"""Agents whose answers are lost on the way, with SDKs that ask again by themselves, over a line that goes dead without
a word: what an agent never saw is not trained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.standins.vllm import plain, role_chunk, streamed, token_chunk, usage_chunk
from tests.swarm.server.conftest import Claimed, Rig, ready

pytestmark = pytest.mark.anyio

HI: Any = [{"role": "user", "content": "hi"}]


class Line:
    """A relay to the server at ``address``. The next ``deaths`` times an answer begins, the caller's end closes before
    a byte of it; the server hears nothing of that, and gives all of it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self.deaths = 0

    async def carry(self, from_caller: asyncio.StreamReader, to_caller: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(*self._address)

        async def ask() -> None:
            while data := await from_caller.read(65536):
                to_server.write(data)

        asking = asyncio.create_task(ask())
        try:
            while data := await from_server.read(65536):
                if self.deaths:
                    self.deaths -= 1
                    to_caller.transport.abort()
                    while await from_server.read(65536):
                        pass
                    return
                to_caller.write(data)
        finally:
            asking.cancel()
            for end in (to_caller, to_server):
                end.transport.abort()


@pytest.fixture
async def line(rig: Rig, episode: Claimed) -> AsyncGenerator[tuple[Line, str]]:
    """With the address of the episode at its end."""
    address = urlsplit(episode.base_url)
    assert address.hostname and address.port
    line, carried = Line((address.hostname, address.port)), set[asyncio.Task[None]]()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        carried.add(asyncio.create_task(line.carry(reader, writer)))

    async with await asyncio.start_server(accepted, "127.0.0.1", 0) as server:
        yield line, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{address.path}"
        for task in carried:
            task.cancel()
        await asyncio.gather(*carried, return_exceptions=True)


async def chat(url: str, key: str) -> str:
    import openai

    async with openai.AsyncOpenAI(base_url=url, api_key=key) as sdk:
        return (await sdk.chat.completions.create(model="tiny", messages=HI)).choices[0].message.content or ""


async def stream(url: str, key: str) -> str:
    import openai

    async with openai.AsyncOpenAI(base_url=url, api_key=key) as sdk:
        chunks = await sdk.chat.completions.create(model="tiny", messages=HI, stream=True)
        return "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices]).strip()


async def message(url: str, key: str) -> str:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key) as sdk:
        answer: Any = await sdk.messages.create(model="tiny", max_tokens=20, messages=HI)
        return answer.content[0].text


@pytest.mark.parametrize("ask", [chat, stream, message])
async def test_an_answer_that_was_lost_is_not_trained(
    rig: Rig, episode: Claimed, line: tuple[Line, str], ask: Callable[[str, str], Awaitable[str]]
) -> None:
    relay, url = line
    answers = [[5], [6], [7]]
    rig.vllm.script.extend(
        streamed(role_chunk(), token_chunk(ids), token_chunk([], "stop"), usage_chunk(1))
        if ask is stream
        else plain(ids)
        for ids in answers
    )
    relay.deaths = 2
    assert await ask(url, episode.key) == "t7"
    await rig.eventually(lambda: len(episode.calls) == 3)
    assert sorted(call.response_ids for call in episode.calls) == answers
    tokens = (await episode.end())["tokens"][episode.uuid]
    assert (tokens["calls"], tokens["sampled"], tokens["trained"], tokens["repeated"]) == (3, 3, 1, 2)
    (trajectory,) = [one for group in rig.controller.pool.collection.groups.waiting() for one in group.members]
    assert [timeline.response_ids.tolist() for timeline in trajectory.trajectory.timelines] == [[7]]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("in_flight", [False, True])
async def test_a_retry_of_a_refused_call_replaces_no_equal_answer_that_came(
    rig: Rig, episode: Claimed, streams: bool, in_flight: bool
) -> None:
    """An agent that asks the same again, as where it could not read the answer, while the engine goes."""
    rig.vllm.script += [plain([5]), rig.vllm.hang()]
    assert (await episode.chat()).status_code == 200
    if in_flight:
        second = asyncio.create_task(episode.chat(stream=streams))
        await rig.eventually(lambda: len(rig.vllm.requests) == 2)
        rig.controller.offline("killed by a test")
    else:
        rig.vllm.script.clear()
        rig.controller.offline("killed by a test")
        second = asyncio.create_task(episode.chat(stream=streams))
    refused = await second
    assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
    rig.controller.boot()
    rig.controller.rollout_ready(ready(rig.vllm_address))
    rig.vllm.script.append(plain([6]))
    retry = episode.request()
    retry.headers["x-stainless-retry-count"] = "1"
    assert (await rig.client.send(retry)).status_code == 200
    tokens = (await episode.end())["tokens"][episode.uuid]
    assert (tokens["sampled"], tokens["trained"]) == (2, 2)
