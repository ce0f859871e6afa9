"""A team of agents with two model names trains two models through one gateway, each on its own requests alone; the end
of one swarm server is no concern of the other's agent.

Everything is in a process of its own: two swarm servers with their journals, their engines, and the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm.server.journal.export import export
from tests.gateway.conftest import write_hooks
from tests.gateway.resilience.rig import REWARD, Rig, ask_here, running, until_async
from tests.gateway.resilience.scenarios import Seen, using
from tests.gateway.resilience.users import ALL, Ask, ask
from tests.gateway.resilience.watching import gateway_process

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

MODELS = ("planner", "coder")
#: For a few steps of an engine that trains in no time, on a machine that has other things to do.
_SECONDS = 240.0


@contextlib.asynccontextmanager
async def team(folder: Path) -> AsyncGenerator[dict[str, Rig]]:
    """A swarm server for each of the models, and one gateway before them."""
    async with contextlib.AsyncExitStack() as stack:
        rigs: dict[str, Rig] = {}
        routes: list[dict[str, Any]] = []
        for name in MODELS:
            (folder / name).mkdir()
            rig = rigs[name] = await stack.enter_async_context(running(folder / name))
            hooks = write_hooks(folder / name / "hooks", REWARD)
            routes.append({"name": f"for {name}", "models": [name], "swarm_url": rig.url, "hooks": str(hooks)})
        config = {"port": 0, "routes": routes}
        gateway = await stack.enter_async_context(gateway_process(folder, config))
        for rig in rigs.values():
            rig.served_by(gateway)
        yield rigs


def ways(model: str) -> list[Ask]:
    """Every way to ask, streamed and not, for ``model``."""
    return [replace(way, body={**way.body, "model": model}) for way in ALL]


async def use(rigs: dict[str, Rig], name: str, steps: int) -> Seen:
    """The agent that uses model ``name`` asks in every way, and goes on until the model has made ``steps`` more."""
    rig, seen, until = rigs[name], Seen(), rigs[name].steps + steps
    for way in ways(name):
        seen.add(await ask(rig.gateway.port, way, f"{name} {way.name}", f"{name}-first"))
    async with using(rig, seen, ways(name), random.randrange(2**32), users=3, about=name):
        await rig.stepped(until, within=_SECONDS)
    return seen


async def nothing_is_left(rigs: dict[str, Rig]) -> None:
    async def holds() -> bool:
        held = (await ask_here(rigs["coder"].gateway.port, "/held"))["held"]
        running = [await rig.under_way() for rig in rigs.values()]
        return not any({**held, "tasks": 0}.values()) and not any(any(one.values()) for one in running)

    await until_async(holds, _SECONDS, "something is left")


def trained(rig: Rig) -> list[dict[str, Any]]:
    """The episodes that the journal of ``rig`` says were trained."""
    out = rig.folder / "trained.jsonl"
    export(rig.folder / "run" / "journal.db", out)
    return [json.loads(line) for line in out.read_text().splitlines()]


async def test_two_models_are_trained_through_one_gateway(tmp_path: Path) -> None:
    async with team(tmp_path) as rigs:
        planner, coder = rigs["planner"], rigs["coder"]
        both = await asyncio.gather(*(use(rigs, name, steps=3) for name in MODELS))
        assert [seen.errors for seen in both] == [[], []]

        coding = Seen()
        async with using(coder, coding, ways("coder"), random.randrange(2**32), users=3, about="coder"):
            await planner.kill_server()
            lost = await ask(coder.gateway.port, ways("planner")[0], "planner, are you there?", "planner-lost")
            assert lost.status == 503 and b"\r\nretry-after:" in lost.received, lost.received
            await coder.stepped(coder.steps + 2, within=_SECONDS)
        assert coding.errors == []

        await planner.start_server()
        await planner.rolling()
        assert (await use(rigs, "planner", steps=1)).errors == []
        await nothing_is_left(rigs)

    for name, rig in rigs.items():
        episodes = trained(rig)
        # a step takes four groups of two; the last ones before a kill are perhaps not told
        assert len(episodes) >= 2 * 8, name
        assert {episode["request_id"].partition("-")[0] for episode in episodes} == {name}
        assert {Path(episode["hook"]).parent.name for episode in episodes} == {name}, episodes[0]["hook"]
        assert {call["asked"].split()[0].strip(",") for call in rig.calls()} == {name}
