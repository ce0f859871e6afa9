"""A configuration that is exchanged while requests run: what is wrong changes nothing, and nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml

from gateway.app import create_app
from gateway.cli.sections import read_gateway
from gateway.keys.store import KeyFile
from tests.gateway.conftest import REWARD, ask, serving, write_hooks
from tests.standins.swarm import Swarm, by_number, once

pytestmark = pytest.mark.anyio
UNREADABLE = f"hooks: {'long' * 100}"
WRONG = ["swarm_url: [", "hooks: nowhere", "misspelt: 1", UNREADABLE, "num_repeat: -1"]


class Config:
    """The gateway's file."""

    def __init__(self, folder: Path, swarm: Swarm) -> None:
        self.path = folder / "gateway.yaml"
        self._good = {"swarm_url": swarm.url, "hooks": str(write_hooks(folder / "hooks"))}

    def write(self, *aliases: str) -> None:
        self.path.write_text(yaml.safe_dump({**self._good, "model_aliases": list(aliases)}))


async def test_a_wrong_configuration_leaves_the_old_one_while_requests_run(swarm: Swarm, tmp_path: Path) -> None:
    config, go = Config(tmp_path, swarm), asyncio.Event()
    config.write("old")

    swarm.answer = once(go, by_number)
    app = create_app(read_gateway(config.path), lambda: read_gateway(config.path))
    async with serving(app) as http, asyncio.TaskGroup() as group:
        before = group.create_task(ask(http, model="old"))
        await swarm.until(lambda: swarm.sampling)
        for wrong in WRONG:
            config.path.write_text(wrong)
            refused = await http.post("/admin/reload")
            assert refused.status_code == 400, refused.text
        counts = (await http.get("/status")).json()
        assert counts["reload_failures"] == len(WRONG) and "num_repeat" in counts["reload_error"]
        during = group.create_task(ask(http, model="old"))
        await swarm.until(lambda: len(swarm.calls) == 2)
        config.write("new")
        assert (await http.post("/admin/reload")).status_code == 200
        assert (await http.get("/status")).json()["reload_error"] == ""
        after = group.create_task(ask(http, model="new"))
        assert (await ask(http, model="old")).status_code == 404
        go.set()
        assert [(await one).status_code for one in (before, during, after)] == [200] * 3


#: lets a hook that hangs as it is loaded go on
RELEASED = threading.Event()


async def test_a_hook_that_hangs_as_it_is_loaded_ends_its_reload_alone(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(tmp_path, swarm)
    config.write("old")
    app = create_app(read_gateway(config.path), lambda: read_gateway(config.path))
    # the threads of the event loop are few, and not for what may hang in them
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(serving(app))
        RELEASED.clear()
        stack.callback(RELEASED.set)
        hangs = f"from {__name__} import RELEASED\nRELEASED.wait()\n"
        write_hooks(tmp_path / "hooks", hangs + REWARD)
        with monkeypatch.context() as patch:
            patch.setattr("gateway.runtime.LOAD_SECONDS", 0.2)
            async with asyncio.timeout(30):
                refused = await http.post("/admin/reload")
        assert (refused.status_code, "0.2 s" in refused.text) == (400, True)
        assert (await ask(http, model="old")).status_code == 200
        write_hooks(tmp_path / "hooks", REWARD)
        assert (await http.post("/admin/reload")).status_code == 200


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this platform has no SIGHUP")
async def test_a_hangup_reads_the_file_again(swarm: Swarm, tmp_path: Path) -> None:
    config = Config(tmp_path, swarm)
    config.write("old")
    app = create_app(read_gateway(config.path), lambda: read_gateway(config.path))
    async with serving(app) as http:
        assert (await ask(http, model="old")).status_code == 200
        config.path.write_text(WRONG[0])
        os.kill(os.getpid(), signal.SIGHUP)
        assert (await ask(http, model="old")).status_code == 200
        config.write("new")
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(60):
            while (await ask(http, model="new")).status_code != 200:
                pass
        assert (await ask(http, model="old")).status_code == 404


async def test_a_changed_helper_beside_the_hook_counts_and_a_broken_one_leaves_the_old(
    swarm: Swarm, tmp_path: Path
) -> None:
    config = Config(tmp_path, swarm)
    config.write("m")
    folder = write_hooks(
        tmp_path / "hooks",
        "from worth import of\n"
        "def on_compute_relative_reward(task, candidates, context):\n"
        "    return [of(one.text) for one in candidates]\n",
    )
    (folder / "worth.py").write_text("def of(text):\n    return +len(text)\n")
    app = create_app(read_gateway(config.path), lambda: read_gateway(config.path))
    async with serving(app) as http:

        async def best() -> str:
            return (await ask(http, model="m")).json()["choices"][0]["message"]["content"]

        longest = await best()
        (folder / "worth.py").write_text("def of(text:\n    return -len(text)\n")
        refused = await http.post("/admin/reload")
        assert (refused.status_code, "worth.py, line 1" in refused.json()["error"]["message"]) == (400, True)
        assert await best() == longest
        (folder / "worth.py").write_text("def of(text):\n    return -len(text)\n")
        assert (await http.post("/admin/reload")).json()["changed"] == ["hooks"]
        assert len(await best()) < len(longest)


async def test_keys_stay_too_where_a_server_cannot_be_connected(swarm: Swarm, tmp_path: Path) -> None:
    config = Config(tmp_path, swarm)
    (tmp_path / "admin").mkdir()
    admin = {"authorization": f"Bearer {KeyFile(tmp_path / 'keys.json').create('boss', admin=True)[1]}"}
    config.write("m")
    good = yaml.safe_load(config.path.read_text()) | {"keys_file": "keys.json", "api_keys": ["sk-first"]}
    config.path.write_text(yaml.safe_dump(good))
    app = create_app(read_gateway(config.path), lambda: read_gateway(config.path))
    async with serving(app) as http:
        for wrong in ({"swarm_url": f"{swarm.url}/v1"}, {"swarm_token": "no-tökén"}, {"keys_file": "admin"}):
            config.path.write_text(yaml.safe_dump(good | {"api_keys": ["sk-next"]} | wrong))
            refused = await http.post("/admin/reload", headers=admin)
            assert refused.status_code == 400, refused.text
            assert (await ask(http, {"x-api-key": "sk-first"}, model="m")).status_code == 200
            assert (await ask(http, {"x-api-key": "sk-next"}, model="m")).status_code == 401


async def test_groups_of_a_server_that_a_reload_left_are_submitted_at_shutdown(swarm: Swarm, tmp_path: Path) -> None:
    config = Config(tmp_path, swarm)
    config.write("m")
    mine = yaml.safe_load(config.path.read_text()) | {"feedback_window_seconds": 1000, "acknowledge_seconds": 0.1}
    config.path.write_text(yaml.safe_dump(mine))
    app = create_app(read_gateway(config.path), lambda: read_gateway(config.path))
    async with serving(app) as http:
        assert (await ask(http, model="m")).status_code == 200
        config.path.write_text(yaml.safe_dump(mine | {"swarm_token": "new"}))
        assert (await http.post("/admin/reload")).json()["changed"] == ["swarm_token"]
        assert (await ask(http, model="m")).status_code == 200
        assert not swarm.ends
        began = time.monotonic()
    assert (sum(len(group["ends"]) for group in swarm.ends), swarm.open_episodes) == (len(swarm.claimed), set())
    assert time.monotonic() - began < 10
