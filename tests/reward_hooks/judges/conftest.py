"""A scripted judge on a socket, and judges of ours that are closed before it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from reward_hooks.judges import Judge, make_judge
from tests.reward_hooks.judges.scripted import ScriptedJudge, judging

OpenJudge = Callable[..., Judge]


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedJudge]:
    async with judging() as one:
        yield one


@pytest.fixture
async def open_judge(scripted: ScriptedJudge) -> AsyncIterator[OpenJudge]:
    """``open_judge("listwise", endpoint={...}, **settings)``: a judge of ours that asks the scripted one."""
    async with AsyncExitStack() as opened:

        def open_one(kind: str, *, endpoint: dict[str, Any] | None = None, **settings: Any) -> Judge:
            judge = make_judge({"kind": kind, "endpoint": {**scripted.endpoint, **(endpoint or {})}, **settings})
            opened.push_async_callback(judge.aclose)
            return judge

        yield open_one
