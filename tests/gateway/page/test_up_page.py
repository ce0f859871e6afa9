"""The page of the gateway that ``up`` serves, in a real browser: every screen, and a gateway that hangs, dies, or ends
the login."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
import yaml

from gateway.keys.store import KeyFile
from tests.gateway.conftest import write_hooks
from tests.gateway.page.browser import Browser, chromium
from tests.gateway.page.test_browser import SCREENS
from tests.kill.up import ENGINE_VARIABLE
from tests.standins.engine import FOLDER_VARIABLE
from tests.up_process import COMMAND, Up

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on PATH"),
]

HOOK = """
def on_compute_relative_reward(task, candidates, context):
    return [len(candidate.text) for candidate in candidates]
"""


async def test_the_page_of_the_gateway_of_up(tmp_path: Path, chrome: Browser) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    app, ada = keys.create("shop")[1], keys.create("Ada", page="judge")[1]
    model = tmp_path / "stand-in"
    model.mkdir()
    (model / "config.json").write_text("{}")
    job = {"model": str(model), "batch_size": 8, "num_repeat": 2, "max_parallel_episodes": 32, "serving": "always"}
    hooks = write_hooks(tmp_path / "hooks", HOOK)
    gateway = {"port": 0, "hooks": str(hooks), "keys_file": "keys.json", "ui": {}}
    path = tmp_path / "up.yaml"
    path.write_text(yaml.safe_dump({"job": job, "swarm": {"port": 0, "run_dir": "run"}, "gateway": gateway}))
    env = {ENGINE_VARIABLE: "paced", FOLDER_VARIABLE: str(tmp_path)}
    up = Up(path, (*COMMAND[:-1], "tests.kill.up"), env)
    try:
        up.expect("ready", 120)
        url = up.url("gateway")

        def ask(text: str) -> None:
            body = {"messages": [{"role": "user", "content": text}]}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"x-api-key": app}, timeout=60)
            assert answer.status_code == 200, answer.text

        ask("hello there")
        async with chrome.tab() as tab:
            await tab.goto(f"{url}/ui")
            await tab.sees("Log in")
            await tab.write(ada)
            await tab.press("Enter")
            # until then, the field of the login takes the keys
            await tab.sees(SCREENS["#/groups"])
            for key, screen in (("i", "#/learning"), ("p", "#/policies"), ("a", "#/data"), ("g", "#/groups")):
                await tab.press(key)
                await tab.sees(SCREENS[screen])
            await tab.press("Enter")
            await tab.sees(SCREENS["#/group/"])
            await tab.press("1")
            await tab.sees("You picked 1.")
            # it hangs
            up.child("serve").send_signal(signal.SIGSTOP)
            await tab.press("Escape")
            await tab.sees("The gateway takes long to answer", "#banner")
            up.child("serve").send_signal(signal.SIGCONT)
            await tab.sees(SCREENS["#/groups"])
            await tab.until("document.querySelector('#banner').hidden")
            # it dies; another one at the same address knows no login
            up.child("serve").kill()
            up.expect("gateway_recovered", 120)
            await tab.sees("log in: the page needs a key of the gateway")
            await tab.write(ada)
            await tab.press("Enter")
            await tab.sees("No group yet")
            ask("once more")
            await tab.sees("once more")
            # the key is revoked
            keys.revoke("Ada")
            await tab.sees("Log in")
            assert tab.faults == []
        assert up.interrupt() == 0
    finally:
        up.end()
