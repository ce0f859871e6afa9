"""The monitor's screen, in front of real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from textual.app import App, ComposeResult

from gateway.app import create_app as create_gateway
from gateway.config.gateway import GatewayConfig
from gateway.tui.widgets import TableView
from gateway.views.format import Row, Table
from swarm.http.serve import AppServer, bind, url_of, uvicorn_config
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.states import EngineState
from swarm.types import StepResult
from tests.gateway.conftest import OpenGateway, write_hooks
from tests.gateway.tui.conftest import watching
from tests.ports import free_ports
from tests.standins.swarm import Swarm, error
from tests.standins.vllm import listening
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig


async def finish(rig: server.Rig, task: str, reward: float, client: str = "me") -> None:
    episode = await rig.claim(client)
    await episode.chat()
    await episode.end(task, reward)


def url(rig: server.Rig) -> str:
    return str(rig.client.base_url)


async def test_a_rolling_server_its_help_and_its_log(rig: server.Rig) -> None:
    await rig.post("/push_verbose_log", tag="vllm", message="first \x1b]0;owned\x07 [bold]line[/bold]")
    await finish(rig, "task-one", 1.0)
    running = await rig.claim("somebody", throttle_policy={"current_task_id": "task-two"})
    async with watching([url(rig)]) as screen:
        await screen.shows("● ROLLING", "task-one", "somebody", "task-two", "1 to come", running.uuid[-8:])
        await screen.shows(
            "0 of 2 tasks, 2 requests to go (0%) for step 1; 1 begun, 1 episodes wait", "1 of 4 slots run", "as of "
        )
        await screen.press("l")
        text = await screen.shows("[vllm] first \N{REPLACEMENT CHARACTER}]0;owned", "[bold]line[/bold]")
        assert "\x1b" not in text
        await screen.press("question_mark")
        await screen.shows("Help (Escape closes)", "leave", "◆ WEIGHT_SYNCING")
        await screen.press("escape")
        await screen.until(lambda text: "Help (Escape closes)" not in text)


async def test_a_life_from_boot_over_steps_to_its_end_with_the_reason(rig: server.Rig) -> None:
    rig.controller.offline("stopped", ["last words of the engine"])
    async with watching([url(rig)]) as screen:
        await screen.shows("○ OFFLINE", "why    stopped", "| last words of the engine")
        rig.controller.boot()
        rig.controller.engine.progress("loading the model", "shard 1/2")
        await screen.shows("◔ BOOTING", "doing  loading the model: shard 1/2")
        rig.controller.rollout_ready(server.ready(rig.vllm_address))
        await screen.shows("● ROLLING", "policy version 0")
        straggler = await rig.claim("straggler")
        for reward in (0.0, 1.0):
            await finish(rig, "one", reward)
            await finish(rig, "two", 0.5)
        await screen.shows("2 of 2 tasks, 0 requests to go (100%)", "2 complete, 0 begun")
        async with asyncio.TaskGroup() as group:
            taking = group.create_task(rig.controller.next_batch())
            await screen.shows("◕ ROLLING_POST", "straggler")
            await straggler.end("three")
        batch = taking.result()
        await screen.shows("◆ WEIGHT_SYNCING")
        done = StepResult(step=1, batch_id=batch.batch_id, metrics={"swarm/reward_mean": 0.5}, seconds=2)
        rig.controller.step_done(done)
        rig.controller.rollout_ready(server.ready(rig.vllm_address, 1, batch.batch_id))
        await screen.shows(
            "● ROLLING", "policy version 1", "step    1  reward 0.500", "1 of 2 groups differ", "4 trained"
        )
        rig.controller.engine_failed("CUDA out of memory")
        rig.controller.offline("the engine ended with code 1: CUDA out of memory", ["RuntimeError: out of memory"])
        await screen.shows("○ OFFLINE", "CUDA out of memory", "| RuntimeError: out of memory")


async def test_two_servers_and_one_that_is_not_there(rig: server.Rig, tmp_path: Path) -> None:
    other = create_app(ServerConfig(run_dir=tmp_path / "other"))
    async with listening(other) as second, watching([url(rig), second, "http://127.0.0.1:9"]) as screen:
        await screen.shows("2 of 3 servers answer", "● ROLLING", "○ OFFLINE", "! away")
        await screen.says("is OFFLINE: no training job yet")
        await screen.says("start it (`swarm-gateway swarm start`) or check --swarm-url")
        await screen.press("2")
        await screen.shows("policy version 0", "● ROLLING")
        await screen.press("right_square_bracket")
        await screen.shows("why    no training job yet")
        await screen.press("4")
        await screen.shows("! AWAY: no swarm server answers at http://127.0.0.1:9")
        await screen.press("right_square_bracket")
        await screen.shows("1 all", "2 of 3 servers answer", "as of", "reward")


async def test_a_table_stays_where_it_is_scrolled_to() -> None:
    class Alone(App[None]):
        def compose(self) -> ComposeResult:
            yield TableView()

    async with Alone().run_test(size=(40, 10)) as pilot:
        grid = pilot.app.query_one(TableView)
        grid.focus()
        for word in ("first", "second"):
            grid.show(Table(("word", ">count"), [Row((word, str(number))) for number in range(50)]))
            await pilot.pause()
            if word == "first":
                await pilot.press(*["down"] * 7)
        assert grid.row_count == 50 and grid.scroll_offset.y == 7


@asynccontextmanager
async def swarm_server(run_dir: Path, port: int) -> AsyncGenerator[str]:
    listener, ready = bind("127.0.0.1", port), asyncio.Event()
    app = create_app(ServerConfig(port=port, run_dir=run_dir))
    uvicorns = uvicorn_config(app, shutdown_seconds=5, log_level="warning")
    server = AppServer(uvicorns, release=app.state.controller.close, ready=ready.set)
    task = asyncio.create_task(server.serve([listener]))
    try:
        # a server that does not start is not waited for
        await asyncio.wait({task, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert ready.is_set()
        yield url_of("127.0.0.1", port)
    finally:
        server.should_exit = True
        await task


async def test_a_server_that_goes_is_told_and_shown_again_once_it_is_back(tmp_path: Path) -> None:
    [port] = free_ports(1)
    async with swarm_server(tmp_path, port) as url:
        watch = watching([url])
        screen = await watch.__aenter__()
        try:
            await screen.shows("the swarm server answers", "○ OFFLINE")
        except BaseException:
            await watch.__aexit__(None, None, None)
            raise
    try:
        await screen.shows("the swarm server does not answer", "! AWAY", "the data below is", "○ OFFLINE")
        await screen.says(f"no swarm server answers at {url}")
        await screen.until(lambda _: screen.app.pollers[0].failures >= 3)
        async with swarm_server(tmp_path, port):
            await screen.press("r")
            await screen.shows("the swarm server answers", "○ OFFLINE", "answers again, after")
            await screen.until(lambda text: "! AWAY" not in text)
    finally:
        await watch.__aexit__(None, None, None)


BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"
REWARD = """
def on_compute_relative_reward(task, candidates, context):
    if "fail" in str(task.init_messages):
        raise ValueError("no")
    return [len(candidate.text.split()) for candidate in candidates]
"""


async def test_a_gateway_its_groups_its_queue_and_its_failures(open_gateway: OpenGateway, swarm: Swarm) -> None:
    async with (
        open_gateway(reward=REWARD, max_in_flight=1) as http,
        watching([], [str(http.base_url)]) as screen,
    ):
        await screen.shows("● engine ROLLING", "policy version 7, model tiny", "0 requests", "nothing has failed")
        assert (await http.post(CHAT, json=BODY)).status_code == 200
        await screen.shows("1 requests", "1 trained, 0 dropped", "3 of answers that users got", "9 of the others (75%")
        await screen.shows("1 of 1 groups differ, of the latest judged")
        rows = ["1 of 1", "75%", "│ default "]
        await screen.until(lambda text: any(all(word in row for word in rows) for row in text.splitlines()))
        await http.post(CHAT, json=BODY, headers={"x-swarm-policy": "nonsense"})
        await screen.shows("1 errors", "errors that callers got, by code", "1 callers got the error")
        await http.post(CHAT, json=BODY | {"messages": [{"role": "user", "content": "fail"}]})
        await screen.shows("1 dropped", "reward_hook_failed", "hooks without a result, by code")
        await screen.shows("the hook fails, 1 x on_compute_relative_reward raised ValueError (")

        held = asyncio.Event()

        async def hold(body: dict[str, Any], number: int) -> Response:
            await held.wait()
            return error(500, "held")

        swarm.answer = hold
        asking = [asyncio.create_task(http.post(CHAT, json={**BODY, "user": str(number)})) for number in range(3)]
        await screen.shows("3 in flight", "2 queued")
        held.set()
        await asyncio.gather(*asking)
        await screen.shows("0 in flight, 0 queued")
        await swarm.set_state(EngineState.OFFLINE)
        await screen.shows("○ engine OFFLINE")


async def test_a_breaker_that_opens(nobody: str) -> None:
    config = GatewayConfig(swarm_url=None, upstream={"base_url": f"{nobody}/v1"}, hooks=None)
    async with listening(create_gateway(config)) as gateway, watching([], [gateway]) as screen:
        await screen.shows("no swarm server", "closed")
        async with httpx.AsyncClient(base_url=gateway, timeout=30, trust_env=False, verify=False) as http:
            for _ in range(6):
                assert (await http.post(CHAT, json=BODY)).status_code in (502, 503)
        await screen.shows("breaker of route default's upstream is")
        await screen.until(lambda text: "! open" in text or "! half_open" in text)


async def test_a_gateway_and_its_swarm_server_in_a_small_terminal(rig: server.Rig, tmp_path: Path) -> None:
    rig.controller.engine.died("killed by SIGKILL")
    rig.controller.offline("killed by SIGKILL")
    rig.controller.boot()
    gateway = create_gateway(GatewayConfig(swarm_url=url(rig), hooks=str(write_hooks(tmp_path / "hooks"))))
    async with listening(gateway) as second, watching([url(rig)], [second], size=(80, 24)) as screen:
        await screen.shows("2 of 2 servers answer")
        await screen.press("2")
        await screen.shows("◔ BOOTING", "died   killed by SIGKILL (1 in a row without a step)")
        await screen.press("3")
        await screen.shows("engine BOOTING", "died   killed by SIGKILL (1 in a row without a step)", "Routes (g)")
        for key, words in (("f", "nothing has failed"), ("l", "nothing has happened yet"), ("g", "default")):
            await screen.press(key)
            await screen.shows(words)
        await screen.press("tab")
        await screen.shows("Swarm servers (w)", url(rig).removeprefix("http://").rstrip("/"))
        await screen.press("shift+tab")
        await screen.shows("Routes (g)")
        assert all(len(line) <= 80 for line in screen.text.splitlines())


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (30, 8)])
async def test_terminals_of_any_size(rig: server.Rig, size: tuple[int, int]) -> None:
    await finish(rig, "a task with a name that is longer than any column has room for " * 3, 1.0)
    await rig.claim("a client with a long name, 日本語" * 5)
    async with watching([url(rig)], size=size) as screen:
        await screen.shows("● ROLLING")
        for key in "setcdl":
            await screen.press(key)
            await screen.pilot.pause()
        await screen.press("e")
        if size[1] >= 16:
            await screen.shows("a clien")
        await screen.pilot.resize_terminal(80, 24)
        await screen.shows("episode", "a clien", "age", "idle", "q Quit")
        assert all(len(line) <= 80 for line in screen.text.splitlines())
        await screen.pilot.resize_terminal(180, 50)
        await screen.shows("╭─ Steps (s)", "╭─ Log (l)", "╭─ Tasks (t)")
