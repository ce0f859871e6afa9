"""The chat tutorial as it ships: its talks, its reward, and its readme with the application's own command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_hooks.contract import Candidate, HookContext
from reward_hooks.loader import load_hooks
from swarm.importer import SourceFolder
from swarm.types import Task
from tests.tutorial.readmes import TUTORIALS

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


def check_readme(folder: Path, said: str) -> None:
    """What the commands of its readme leave; see ``test_readmes.py``."""
    assert "held-out prompts prove more" in said
    talk = json.loads((folder / "chat.json").read_text())
    assert [one["role"] for one in talk] == ["system", "user", "assistant", "user", "assistant"]
    assert talk[-1]["content"] in said
