"""What the page costs: bytes, the time until it is useful, and the CPU that open pages take of a gateway."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from gateway.page.kept_groups import KeptAnswer, KeptGroup, KeptGroups
from swarm.types import Notes
from tests.gateway.conftest import OpenGateway
from tests.gateway.page.browser import Browser, chromium

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on PATH"),
]

#: A browser has six connections to one gateway: the other five of ten pages are their streams alone.
GROUPS, ANSWERS, PAGES, SECONDS = 1000, 16, 5, 5.0
#: Milliseconds from the navigation until the rows are there.
_PAINT = """new Promise((done) => {
    const look = () => (document.querySelector('.row') ? done(performance.now()) : setTimeout(look, 2));
    look();
})"""
_BYTES = """[...performance.getEntriesByType('resource'), ...performance.getEntriesByType('navigation')]
    .filter((entry) => !entry.name.includes('/api/')).reduce((sum, entry) => sum + entry.encodedBodySize, 0)"""


class Filled(KeptGroups):
    """1,000 groups of 16 answers."""

    def __init__(self, max_bytes: int, *told: Any) -> None:
        super().__init__(max_bytes, *told)
        for number in range(GROUPS):
            prompt = [{"role": "user", "content": f"question {number}: " + "what is known of it? " * 8}]
            group = KeptGroup(str(number), time.time(), "default", "shop", "", Notes(hook="hook"), prompt, 0, 7)
            for index in range(ANSWERS):
                reward = (number * 7 + index * 13) % 97 / 97
                group.answers[index] = KeptAnswer(index, "answer " * 60, "", [], "stop", 120, 7, 1.0, reward)
            self._groups[group.id] = group


async def test_first_paint_bytes_and_the_cpu_of_open_pages(
    open_gateway: OpenGateway, chrome: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.page.page.KeptGroups", Filled)
    async with open_gateway(ui={}) as http, AsyncExitStack() as tabs:
        paints: list[float] = []
        for _ in range(PAGES):
            tab = await tabs.enter_async_context(chrome.tab())
            await tab.goto(f"{http.base_url}/ui")
            await tab.until("location.pathname === '/ui'")
            paints.append(await tab.js(_PAINT))
            await tab.sees("live", "#live")
            await tabs.enter_async_context(http.stream("GET", "/ui/api/events"))
        size = await tab.js(_BYTES)
        began = time.process_time()
        await anyio.sleep(SECONDS)
        cpu = (time.process_time() - began) / SECONDS
        print(
            f"first useful paint {sorted(paints)[PAGES // 2]:.0f} ms (median of {PAGES}, the first {paints[0]:.0f} ms)"
        )
        print(f"{size / 1024:.1f} KB; {2 * PAGES} open pages take {100 * cpu:.2f} % of a core")
        assert size <= 60 * 1024
        assert cpu < 0.05, "loose: the figure of docs/page.md is of an idle machine"
