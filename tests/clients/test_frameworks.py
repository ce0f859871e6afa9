"""Frameworks and SDKs, unmodified but for their address, through processes of gateway and swarm server: what their user
sees, which tools ran, and that every turn is in the pool to be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients import environments as env
from tests.clients.environments import PythonEnv
from tests.clients.running import APPS, interrupt, needs, run, until_there
from tests.clients.stack import Stack
from tests.clients.table import covers

pytestmark = pytest.mark.clients

SUNNY = "The tools say: Rome is sunny, Oslo is sunny."
USUAL = ("plain", "streamed", "tools", "parallel tools", "second turn")
#: Application, its environment, its further arguments, the groups that it trains (none for an image), and its row.
App = tuple[PythonEnv, str, list[str], int]


def app(client: str, environment: PythonEnv, name: str, groups: int, *arguments: str, cells: tuple[str, ...]) -> Any:
    kept = covers(client, *cells, "interruption")
    return pytest.param((environment, name, list(arguments), groups), marks=kept, id=client)


APPLICATIONS = [
    app("pydantic-ai, chat", env.PYDANTIC_AI, "pydantic_ai_app.py", 6, "chat", cells=(*USUAL, "image")),
    app("pydantic-ai, Responses", env.PYDANTIC_AI, "pydantic_ai_app.py", 6, "responses", cells=(*USUAL, "image")),
    app("pydantic-ai, Anthropic", env.PYDANTIC_AI, "pydantic_ai_app.py", 6, "anthropic", cells=(*USUAL, "image")),
    app("langgraph", env.LANGGRAPH, "langgraph_app.py", 5, cells=(*USUAL, "image")),
    app("litellm, `openai/`", env.LITELLM, "litellm_app.py", 8, "openai", cells=(*USUAL, "image")),
    app("litellm, `anthropic/`", env.LITELLM, "litellm_app.py", 8, "anthropic", cells=(*USUAL, "image")),
    app("instructor", env.INSTRUCTOR, "instructor_app.py", 4, cells=USUAL[:4]),
    app("dspy", env.DSPY, "dspy_app.py", 4, cells=("plain", "tools", "parallel tools", "second turn")),
    app("smolagents", env.SMOLAGENTS, "smolagents_app.py", 7, cells=USUAL),
    app("llama-index", env.LLAMA_INDEX, "llama_index_app.py", 5, cells=(*USUAL, "image")),
    app("haystack", env.HAYSTACK, "haystack_app.py", 7, cells=(*USUAL, "image")),
]
#: What their users see. An image is answered, but not trained.
SEEN: dict[str, dict[str, Any]] = {
    "pydantic_ai_app.py": {"again": "You said: And now?", "object": {"city": "Rome"}},
    "langgraph_app.py": {"again": "still here"},
    "litellm_app.py": {"again": "still here", "tools_streamed": SUNNY, "ran": ["Rome", "Oslo"] * 2},
    "llama_index_app.py": {"again": "You said: And now?"},
    "haystack_app.py": {"again": "You said: And now?", "tools_streamed": SUNNY, "ran": ["Rome", "Oslo"] * 2},
    "smolagents_app.py": {
        "again": "You said: And now?",
        "tools": "Oslo is sunny",
        "tools_streamed": "Oslo is sunny",
        "ran": ["Oslo", "Oslo", "Rome", "Rome"],
    },
    "instructor_app.py": {
        "plain": {"city": "Rome"},
        "streamed": {"city": "Rome"},
        "tools": {"city": "Rome"},
        "parallel": ["Rome", "Oslo"],
    },
    "dspy_app.py": {"again": "You said: And now?", "predicted": "Rome"},
}


@pytest.mark.parametrize("application", APPLICATIONS)
def test_a_framework(served: Stack, tmp_path: Path, application: App) -> None:
    environment, name, arguments, groups = application
    needs(environment)
    command = [str(environment.python), str(APPS / name), served.base_url, *arguments]
    with served.trains(groups):
        seen = json.loads(run(command, tmp_path).splitlines()[-1])
    expected = {"plain": "You said: Hello", "streamed": "You said: Hello", "tools": SUNNY} | SEEN[name]
    assert {key: seen[key] for key in expected if key in seen} == {k: v for k, v in expected.items() if k in seen}
    assert seen.get("pieces", 2) > 1
    assert sorted({*seen.get("ran", ["Oslo", "Rome"])}) == ["Oslo", "Rome"]
    assert seen.get("image", "[image_url]").endswith("[image_url]")
    # whoever leaves is not sampled for
    word = tmp_path / "word"
    with served.trains(0):
        interrupt([*command, str(word)], tmp_path, {}, word.with_suffix(".asked"))
        until_there(word.with_suffix(".left"))
