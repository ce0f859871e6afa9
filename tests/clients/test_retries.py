"""SDKs that ask again, unmodified: with an ``idempotency-key``, the retry of a question under way joins its group, so
that it is sampled and trained once; and where its first attempt was given up, it is still trained once.

The judge waits for a word of the test, so that retries come while their group is under way however slow the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.clients.stack import MODEL, SECONDS, Stack, stack
from tests.gateway.resilience.rig import until_async
from tests.standins.models import GIVES_UP

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

#: After which the SDKs give an attempt up.
PATIENCE = 6.0
#: Enough for the slowest machine.
RETRIES = 10
#: The question is the path of a file: the judge makes ``PATH.heard``, and waits until ``PATH`` is there.
HOOK = f"""
import asyncio, pathlib

async def on_compute_relative_reward(task, candidates, context):
    word = pathlib.Path(candidates[0].request["messages"][-1]["content"])
    word.with_suffix(".heard").touch()
    while not word.exists():
        await asyncio.sleep(0.02)
    return [0.0 if candidate.text == {GIVES_UP!r} else 1.0 for candidate in candidates]
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # a stream that says something now and then is never given up
    silent = {"keepalive_seconds": 60, "hook_timeout_seconds": 300}
    with stack(tmp_path_factory.mktemp("stack"), hook=HOOK, **silent) as running:
        yield running


class Counts:
    """What the gateway has counted since this was made."""

    def __init__(self, served: Stack) -> None:
        self._http = httpx.AsyncClient(base_url=served.url, timeout=SECONDS, trust_env=False)

    async def __aenter__(self) -> Counts:
        self._before = await self._now()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def joined(self) -> int:
        return (await self._now())[0] - self._before[0]

    async def dropped(self) -> int:
        return (await self._now())[1] - self._before[1]

    async def _now(self) -> tuple[int, int]:
        lines = (await self._http.get("/metrics")).text.splitlines()
        joined = next(line for line in lines if line.startswith("gateway_joined_total"))
        groups: dict[str, Any] = (await self._http.get("/status")).json()["groups"]
        return int(float(joined.rpartition(" ")[2])), sum(groups["dropped"].values())


async def test_a_retry_with_a_key_after_a_timeout_joins_the_group_under_way(served: Stack, tmp_path: Path) -> None:
    import anthropic

    words = [tmp_path / name for name in ("chat", "streamed", "response", "message")]
    known = tmp_path / "known"
    known.touch()
    patience: Any = {"api_key": "any", "timeout": PATIENCE, "max_retries": RETRIES}
    async with (
        openai.AsyncOpenAI(base_url=served.base_url, **patience) as sdk,
        anthropic.AsyncAnthropic(base_url=served.url, **patience) as claude,
        Counts(served) as counts,
    ):

        def asked(word: Path) -> list[Any]:
            return [{"role": "user", "content": str(word)}]

        def keyed() -> Any:
            return {"extra_headers": {"idempotency-key": secrets.token_hex(8)}}

        async def chat(word: Path) -> str | None:
            answer = await sdk.chat.completions.create(model=MODEL, messages=asked(word), **keyed())
            return answer.choices[0].message.content

        async def streamed(word: Path) -> str:
            stream = await sdk.chat.completions.create(model=MODEL, messages=asked(word), stream=True, **keyed())
            return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])

        async def response(word: Path) -> str:
            return (await sdk.responses.create(model=MODEL, input=str(word), **keyed())).output_text

        async def message(word: Path) -> str:
            answer: Any = await claude.messages.create(model=MODEL, messages=asked(word), max_tokens=500, **keyed())
            return answer.content[0].text

        async def all_joined() -> bool:
            return await counts.joined() >= len(words)

        ways = (chat, streamed, response, message)
        with served.trains(2 * len(words)):
            # what is slow once is not to be slow where the time counts
            for ask in ways:
                assert await ask(known) == f"You said: {known}"
            answers = asyncio.gather(*(ask(word) for ask, word in zip(ways, words, strict=True)))
            await until_async(all_joined, SECONDS, "not all have joined")
            for word in words:
                word.touch()
            assert await answers == [f"You said: {word}" for word in words]
        assert await counts.dropped() == 0


async def test_a_retry_after_a_lost_connection_trains_once(served: Stack, tmp_path: Path) -> None:
    word = tmp_path / "word"
    async with (
        relay(served.url) as (url, cut),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", timeout=SECONDS, max_retries=RETRIES) as sdk,
        Counts(served) as counts,
    ):

        async def heard() -> bool:
            return word.with_suffix(".heard").exists()

        async def noticed() -> bool:
            return await counts.dropped() >= 1

        with served.trains(1):
            messages: Any = [{"role": "user", "content": str(word)}]
            asking = asyncio.ensure_future(sdk.chat.completions.create(model=MODEL, messages=messages))
            await until_async(heard, SECONDS, "no judge was asked")
            cut()
            await until_async(noticed, SECONDS, "the cut was not noticed")
            word.touch()
            assert (await asking).choices[0].message.content == f"You said: {word}"
        assert await counts.dropped() == 1


@contextlib.asynccontextmanager
async def relay(url: str) -> AsyncGenerator[tuple[str, Callable[[], None]]]:
    """An address that leads to ``url``, and what cuts its connections."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    writers: set[asyncio.StreamWriter] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writers.discard(writer)
            writer.close()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, port)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    def cut() -> None:
        for writer in list(writers):
            writer.transport.abort()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
        cut()
