"""The chat tutorial as it ships: its talks, its reward, and its readme with the application's own command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config.gateway import read_config
from reward_hooks.contract import Candidate, HookContext
from reward_hooks.loader import load_hooks
from swarm.importer import SourceFolder
from swarm.job import parse_job
from swarm.types import Task
from tests.tutorial.readmes import TUTORIALS, commands, run, running, tutorial_copy

FOLDER = TUTORIALS / "opencode_build_chat_plugin"


def test_the_talks_are_what_the_script_writes() -> None:
    rows = [json.loads(line) for line in (FOLDER / "conversations.jsonl").read_text().splitlines()]
    assert rows == SourceFolder(FOLDER).module("make_conversations").rows()


@pytest.mark.anyio
async def test_a_companion_asks_back_and_says_nothing_twice() -> None:
    hooks = load_hooks(FOLDER)
    before = "That sounds lovely, was it cold there?"
    history = [
        {"role": "user", "content": "I have been to the sea."},
        {"role": "assistant", "content": before},
        {"role": "user", "content": "Yes."},
    ]
    texts = [
        "Then you need a warm tea now. What did you see?",
        "Then you need a warm tea now.",
        before,
        "",
        "word " * 60,
    ]
    finishes = ["stop"] * 4 + ["length"]
    candidates = [
        Candidate(index=index, message={}, text=text, finish_reason=finish)
        for index, (text, finish) in enumerate(zip(texts, finishes, strict=True))
    ]
    task = Task(task_id="t", main_query="Yes.", init_messages=history)
    rewards: Any = hooks.reward(task, candidates, HookContext(num_repeat=5))
    values = [reward.value for reward in rewards]
    assert values[0] > 0.9
    assert 0 < values[1] < 0.5
    assert values[2:] == [0.0, 0.0, 0.0]


def test_the_configuration_is_valid() -> None:
    config = yaml.safe_load((FOLDER / "config.yaml").read_text())
    assert parse_job(yaml.safe_dump(config["job"])).model_name == "smollm2-135m"
    assert Path(read_config(config["gateway"], folder=FOLDER).hooks) == FOLDER


@pytest.mark.slow
@pytest.mark.usefixtures("model_and_engine")
def test_the_readme_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tutorial_copy("chat_plugin", tmp_path)
    pull, up, users = commands((folder / "readme.md").read_text())
    assert "smollm2-135m" in run(pull, folder)
    with running(up, folder):
        told = run(users, folder)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{config['gateway']['port']}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        assert run([sys.executable, "chat.py", "I have been to the sea."], folder).strip()
        assert run([sys.executable, "chat.py", "It was cold."], folder).strip()
    assert "mean reward" in told
    talk = json.loads((folder / "chat.json").read_text())
    assert [one["role"] for one in talk] == ["system", "user", "assistant", "user", "assistant"]
    assert (folder / "runs" / "chat" / "journal.db").is_file()
