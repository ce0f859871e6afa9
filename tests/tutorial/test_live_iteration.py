"""A hook, and an agent's prompt, are replaced while training goes on: one engine, and the journal says which code made
which episode."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarm.client import SwarmClient
from swarm.status import ServerStatus
from tests.engine import tiny_model
from tests.ports import free_ports
from tests.tutorial.readmes import commands, run, running

SECONDS = 400.0
REPEAT = 4
HOOK = """
from grading import BASE

def on_compute_relative_reward(task, candidates, context):
    return [BASE + place / 100 for place, _ in enumerate(candidates)]
"""
AGENT = """
import sys
from openai import OpenAI
from prompt import BASE, PROMPT
from swarm.client import SwarmClient
from swarm.types import WorkflowOutput

with SwarmClient(sys.argv[1], client_uuid="agent") as client:
    for task in ("first", "second"):
        with client.group(4) as group:
            outputs = []
            for place, api in enumerate(group.episodes):
                with OpenAI(base_url=api.base_url, api_key=api.api_key) as model:
                    asked = [{"role": "user", "content": PROMPT + task}]
                    model.chat.completions.create(model="m", messages=asked, max_tokens=4)
                outputs.append(WorkflowOutput(reward=BASE + place / 100))
            group.end(task, outputs)
"""


class Steps:
    """Waits for training steps, which the swarm server tells."""

    def __init__(self) -> None:
        self.step = 0
        self._changed = threading.Condition()

    def observe(self, status: ServerStatus) -> None:
        with self._changed:
            self.step = status.engine.global_step
            self._changed.notify_all()

    def more(self, count: int) -> None:
        with self._changed:
            goal = self.step + count
            assert self._changed.wait_for(lambda: self.step >= goal, SECONDS), f"step {goal} is not done"


@contextmanager
def users(url: str) -> Generator[Callable[[], int]]:
    """People who ask through the gateway without a pause; each must be answered. Gives how many were."""
    stopping = threading.Event()
    answered: list[int] = []

    def ask() -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "Say a word."}], "max_tokens": 4}
        with httpx.Client(timeout=SECONDS) as client:
            while not stopping.is_set():
                body["messages"] = [{"role": "user", "content": f"Say word {len(answered)}."}]
                answered.append(client.post(f"{url}/v1/chat/completions", json=body).status_code)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: len(answered)
    finally:
        stopping.set()
        for thread in threads:
            thread.join(SECONDS)
    assert set(answered) == {200}


def iterate(folder: Path, model: str) -> None:
    """Train with users and an agent; replace the hook's helper, then the agent's prompt; look into the journal."""
    swarm_port, gateway_port = free_ports(2)
    job = {"model": model, "batch_size": 2, "num_repeat": REPEAT, "max_prompt_length": 256, "max_response_length": 8}
    sections: dict[str, Any] = {
        "job": job,
        "swarm": {"port": swarm_port, "run_dir": "runs/live"},
        "gateway": {"port": gateway_port, "hooks": "hooks", "default_route": "default"},
    }
    (folder / "up.json").write_text(json.dumps(sections))
    (folder / "hooks").mkdir()
    (folder / "hooks" / "on_compute_relative_reward.py").write_text(HOOK)
    (folder / "agent.py").write_text(AGENT)

    def say(base: float, prompt: str) -> None:
        (folder / "prompt.py").write_text(f"BASE = {base}\nPROMPT = {prompt!r}\n")

    def judge(base: float) -> None:
        (folder / "hooks" / "grading.py").write_text(f"BASE = {base}\n")

    say(0.1, "Please: ")
    judge(0.3)
    swarm_url, gateway_url = f"http://127.0.0.1:{swarm_port}", f"http://127.0.0.1:{gateway_port}"
    lines = [
        "swarm-gateway up up.json",
        "swarm-gateway swarm export --run-dir runs/live --out all.jsonl --state all",
        f"python agent.py {swarm_url}",
    ]
    up, export, agent = commands("```sh\n" + "\n".join(lines) + "\n```")
    steps = Steps()
    with running(up, folder), SwarmClient(swarm_url) as client, client.watching_status(steps.observe):
        with users(gateway_url):
            steps.more(1)
            judge(0.5)
            httpx.post(f"{gateway_url}/admin/reload", timeout=SECONDS).raise_for_status()
            steps.more(3)
            run(agent, folder)
            say(0.7, "In one word: ")
            run(agent, folder)
            steps.more(1)
        runs = client.runs().runs
    assert [(one.number, one.ended) for one in runs] == [(1, None)], "the engine was never restarted"
    run(export, folder)
    rows = [json.loads(line) for line in (folder / "all.jsonl").read_text().splitlines()]
    bases: dict[tuple[str, str], set[float]] = defaultdict(set)
    began: dict[tuple[str, str], float] = {}
    for row in sorted((row for row in rows if row["reward"] is not None), key=lambda row: row["claimed_at"]):
        maker = (row["hook"], row["code"])
        bases[maker].add(round(row["reward"], 1))
        began.setdefault(maker, row["claimed_at"])
    hook = str(folder / "hooks")
    # each digest stands for the code of its own rewards, in the order in which they came
    assert [(made, bases[made, code]) for made, code in began] == [
        (hook, {0.3}),
        (hook, {0.5}),
        ("", {0.1}),
        ("", {0.7}),
    ]
    assert len({code for _, code in began}) == 4 and all(len(code) == 16 for _, code in began)
    trained = {row["code"] for row in rows if row["step"] is not None}
    assert {code for made, code in began if made} <= trained


@pytest.mark.slow
@pytest.mark.usefixtures("model_and_engine")
def test_the_next_episodes_use_the_new_code(tmp_path: Path) -> None:
    iterate(tmp_path, "smollm2-135m")


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs the cpu extra")
def test_the_next_episodes_of_a_real_engine_use_the_new_code(tmp_path: Path) -> None:
    iterate(tmp_path, str(tiny_model.build(tmp_path / "tiny")))
