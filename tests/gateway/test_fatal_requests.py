"""``up`` with a gateway, a swarm server and an engine in processes of their own, and prompts that kill the engine's."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from swarm.status import MAX_RESTARTS
from tests.gateway.conftest import write_hooks
from tests.gateway.launch.test_up import ROOT, Run, interrupt, quick_polls
from tests.gateway.resilience.rig import JOB, REWARD
from tests.kill.invariants import lines
from tests.standins.engine import FOLDER_VARIABLE

pytestmark = pytest.mark.slow
__all__ = ["quick_polls"]

#: For an engine that dies and starts again.
SECONDS = 120.0


def poison(name: str) -> list[Any]:
    return [{"role": "user", "content": f"LETHAL {name}"}]


class Crowd:
    """Users of OpenAI's SDK who ask without a pause, each time something else; they retry as their SDK does."""

    def __init__(self, url: str, count: int) -> None:
        self.failures: list[str] = []
        self.answers = 0
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(count)]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(SECONDS)

    def _ask(self, number: int) -> None:
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key="any", max_retries=8, timeout=SECONDS) as sdk:
            turn = 0
            while not self._over.is_set():
                turn += 1
                messages: Any = [{"role": "user", "content": f"user {number}, turn {turn}"}]
                try:
                    sdk.chat.completions.create(model="stand-in", messages=messages)
                except openai.APIError as exc:
                    self.failures.append(repr(exc))
                self.answers += 1


def test_a_prompt_that_kills_the_engine_costs_two_deaths_and_nobody_elses_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anthropic

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    told: dict[str, Any] = {}

    def kills(name: str, ask: Callable[[], Any]) -> None:
        """``ask`` is refused, with an end to its retries."""
        try:
            ask()
            told[name] = "answered"
        except (openai.APIStatusError, anthropic.APIStatusError) as exc:
            told[name] = (exc.status_code, exc.response.headers["x-should-retry"])
        except (openai.APIError, anthropic.APIError) as exc:
            told[name] = repr(exc)

    def ask_all(url: str) -> None:
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=SECONDS) as sdk,
            anthropic.Anthropic(base_url=url, api_key="any", timeout=SECONDS) as claude,
        ):
            chat, messages = sdk.chat.completions, claude.messages
            kills("chat", lambda: chat.create(model="stand-in", messages=poison("a")))
            with Crowd(url, 3) as crowd:
                kills("streamed", lambda: list(chat.create(model="stand-in", messages=poison("b"), stream=True)))
                kills("message", lambda: messages.create(model="stand-in", max_tokens=9, messages=poison("c")))
                first = {"x-swarm-policy": "first"}
                kills(
                    "first",
                    lambda: chat.create(model="stand-in", messages=poison("d"), extra_headers=first),
                )
                kills("again", lambda: chat.create(model="stand-in", messages=poison("a"), extra_headers=first))
                told["crowd"] = crowd
            assert chat.create(model="stand-in", messages=[{"role": "user", "content": "hi"}]).choices

    asking: list[threading.Thread] = []
    over = threading.Event()

    def asked_by(url: str) -> None:
        try:
            ask_all(url)
        finally:
            if not over.is_set():
                interrupt()({})

    def ready(values: dict[str, Any]) -> None:
        asking.append(threading.Thread(target=asked_by, args=(told["url"],)))
        asking[0].start()

    def listening(values: dict[str, Any]) -> None:
        if values["name"] == "gateway":
            told["url"] = values["url"]

    run = Run("paced", tmp_path / "run", listening=listening, ready=ready)
    settings = {
        "hooks": str(write_hooks(tmp_path / "hooks", REWARD)),
        "port": 0,
        "offline_wait_seconds": SECONDS,
        "claim_wait_seconds": SECONDS,
    }
    [server] = run.plan.servers
    run.plan = replace(run.plan, servers=(replace(server, job=JOB),), gateway_section=settings)
    try:
        run()
    finally:
        over.set()
        asking[0].join(SECONDS)
    names = ("chat", "streamed", "message", "first", "again")
    assert {name: told[name] for name in names} == dict.fromkeys(names, (500, "false"))
    starts = len([line for line in lines(tmp_path / "engine.jsonl") if "started" in line])
    assert starts - 1 == 2 * 4 > MAX_RESTARTS and "failed" not in run.kinds
    crowd = told["crowd"]
    assert crowd.answers > 0 and not crowd.failures
    records = list((tmp_path / "run" / "refused").iterdir())
    assert len(records) == 4 and {stat.S_IMODE(one.stat().st_mode) for one in records} == {0o600}
    assert not any("LETHAL" in one.read_text() for one in records)
