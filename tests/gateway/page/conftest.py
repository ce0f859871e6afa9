"""A gateway with its page before a stand-in swarm, and visitors of each scope."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.keys.store import KeyFile, PageScope
from tests.gateway.conftest import Http, OpenGateway, ask
from tests.gateway.page.browser import Browser, browser, running

JSON = {"content-type": "application/json"}
#: Says why it likes longer answers.
REASONS = """
from reward_hooks import Reward
def on_compute_relative_reward(task, candidates, context):
    words = [len(candidate.text.split()) for candidate in candidates]
    rated = [candidate.feedback.rating if candidate.feedback else None for candidate in candidates]
    return [
        Reward(
            value=n / 10 if rating is None else rating,
            components={"words": n, "rated": float(rating is not None)},
            reason=f"{n} words are {'many' if n > 2 else 'few'}",
        )
        for n, rating in zip(words, rated)
    ]
"""


class Site:
    """One gateway with its page; ``keys`` by scope, and an application's as ``app``."""

    def __init__(self, http: Http, keys: dict[str, str]) -> None:
        self.http = http
        self.keys = keys
        self.visitors: list[Visitor] = []

    async def close(self) -> None:
        for visitor in self.visitors:
            await visitor.http.aclose()

    @property
    def url(self) -> str:
        return str(self.http.base_url)

    async def ask(self, text: str = "hello", **fields: Any) -> httpx.Response:
        """An application's request."""
        headers = {"x-api-key": self.keys["app"]}
        return await ask(self.http, headers, messages=[{"role": "user", "content": text}], **fields)

    async def visit(self, scope: str) -> Visitor:
        """Somebody who has logged in."""
        visitor = Visitor(httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False, verify=False))
        self.visitors.append(visitor)
        login = await visitor.http.post("/ui/api/login", json={"key": self.keys[scope]})
        assert login.status_code == 204, login.text
        return visitor


class Visitor:
    """A browser without scripts."""

    def __init__(self, http: Http) -> None:
        self.http = http

    async def get(self, path: str) -> Any:
        answer = await self.http.get(f"/ui/api{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def groups(self, **query: Any) -> list[dict[str, Any]]:
        answer = await self.http.get("/ui/api/groups", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()["groups"]

    async def judge(self, group: str, **judgement: Any) -> httpx.Response:
        return await self.http.post(f"/ui/api/groups/{group}/judgement", json=judgement)

    async def undo(self, group: str) -> httpx.Response:
        return await self.http.request("DELETE", f"/ui/api/groups/{group}/judgement", headers=JSON)


@asynccontextmanager
async def site_before(open_gateway: OpenGateway, folder: Path, **settings: Any) -> AsyncIterator[Site]:
    file = KeyFile(folder / "keys.json")
    people: dict[str, PageScope] = {"Lena": "look", "Jo": "judge", "Dana": "decide"}
    keys: dict[str, str] = {scope: file.create(name, page=scope)[1] for name, scope in people.items()}
    keys |= {"app": file.create("shop")[1], "admin": file.create("boss", admin=True)[1]}
    settings = {"ui": {"judgements": str(folder / "judgements.jsonl")}, "reward": REASONS, **settings}
    async with open_gateway(keys_file=file.path, **settings) as http:
        site = Site(http, keys)
        try:
            yield site
        finally:
            await site.close()


@pytest.fixture
async def site(open_gateway: OpenGateway, tmp_path: Path) -> AsyncIterator[Site]:
    async with site_before(open_gateway, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def chromium_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture
async def chrome(chromium_address: str) -> AsyncIterator[Browser]:
    async with browser(chromium_address) as opened:
        yield opened
