"""The table of clients in ``docs/clients.md``: each cell is a test that passed at this version of its client.

A test claims cells with ``@covers(client, *cells)``. A run of ``make test-clients`` notes in ``ran.json`` which of them
passed, and writes the table. ``python -m tests.clients.table`` writes it again.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients import environments as env
from tests.clients.environments import Environment

CELLS = ("plain", "streamed", "tools", "parallel tools", "second turn", "resume", "image", "interruption")
#: Every row, in the order of the page, and what is installed for it.
ROWS: dict[str, Environment] = {
    "Claude Code": env.CLAUDE_CODE,
    "Codex CLI": env.CODEX,
    "Codex CLI, `openai_base_url` alone": env.CODEX,
    "opencode, chat": env.OPENCODE,
    "opencode, Responses": env.OPENCODE,
    "opencode, Messages": env.OPENCODE,
    "Qwen Code": env.QWEN_CODE,
    "mini-swe-agent": env.MINI_SWE,
    "AI SDK, chat": env.AI_SDK,
    "AI SDK, openai-compatible": env.AI_SDK,
    "AI SDK, Responses": env.AI_SDK,
    "AI SDK, Anthropic": env.AI_SDK,
    "pydantic-ai, chat": env.PYDANTIC_AI,
    "pydantic-ai, Responses": env.PYDANTIC_AI,
    "pydantic-ai, Anthropic": env.PYDANTIC_AI,
    "langgraph": env.LANGGRAPH,
    "LangChain": env.LANGCHAIN,
    "litellm, `openai/`": env.LITELLM,
    "litellm, `anthropic/`": env.LITELLM,
    "instructor": env.INSTRUCTOR,
    "dspy": env.DSPY,
    "smolagents": env.SMOLAGENTS,
    "llama-index": env.LLAMA_INDEX,
    "haystack": env.HAYSTACK,
    "openai-agents": env.AGENTS,
    "openai (Node)": env.NODE,
    "`llm`": env.LLM,
}
#: Why no test makes a cell true, by the letter that stands in it.
CAUSES = {
    "s": "always streams",
    "w": "never streams",
    "k": "leaves the conversation to its user: there is nothing to resume",
    "p": "has no way to show the model a picture",
    "a": "is the program of the row above, whose tests these are",
    "n": "was not tried with it",
}
_LIBRARY = {"resume": "k"}
#: The letters of the cells that no test claims.
UNCLAIMED: dict[str, dict[str, str]] = {
    "Claude Code": {"plain": "s"},
    "Codex CLI": {"plain": "s"},
    "Codex CLI, `openai_base_url` alone": {
        "plain": "s",
        **dict.fromkeys(("tools", "parallel tools", "image", "interruption"), "a"),
    },
    "opencode, chat": {"plain": "s"},
    "opencode, Responses": {"plain": "s"},
    "opencode, Messages": {"plain": "s"},
    "Qwen Code": {"plain": "s", "image": "n"},
    "mini-swe-agent": {"streamed": "w", "resume": "k", "image": "p"},
    "AI SDK, chat": _LIBRARY,
    "AI SDK, openai-compatible": _LIBRARY,
    "AI SDK, Responses": _LIBRARY,
    "AI SDK, Anthropic": _LIBRARY,
    "pydantic-ai, chat": _LIBRARY,
    "pydantic-ai, Responses": _LIBRARY,
    "pydantic-ai, Anthropic": _LIBRARY,
    "langgraph": _LIBRARY,
    "LangChain": {**_LIBRARY, "second turn": "n", "image": "n", "interruption": "n"},
    "litellm, `openai/`": _LIBRARY,
    "litellm, `anthropic/`": _LIBRARY,
    "instructor": {**_LIBRARY, "second turn": "n", "image": "n"},
    "dspy": {**_LIBRARY, "streamed": "n", "image": "n"},
    "smolagents": {**_LIBRARY, "image": "n"},
    "llama-index": _LIBRARY,
    "haystack": _LIBRARY,
    "openai-agents": {**_LIBRARY, "image": "n", "interruption": "n"},
    "openai (Node)": {**_LIBRARY, "image": "n", "interruption": "n"},
    "`llm`": {"image": "n", "interruption": "n"},
}
MODULES = ("test_agents", "test_applications", "test_frameworks")

RAN = Path(__file__).with_name("ran.json")
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
_BEGIN, _END = "<!-- table: tests/clients/table.py -->\n", "<!-- end of the table -->\n"

#: Per row: what was installed, and the cells whose tests passed.
Ran = dict[str, dict[str, Any]]


def covers(client: str, *cells: str) -> pytest.MarkDecorator:
    """Marks a test: if it passes, these cells of ``client`` are true."""
    assert client in ROWS and set(cells) <= set(CELLS), (client, cells)
    return pytest.mark.covers(client, cells)


def note(outcomes: Iterable[tuple[str, Iterable[str], bool]]) -> None:
    """Write down which cells passed or failed, and the table."""
    ran: Ran = json.loads(RAN.read_text()) if RAN.exists() else {}
    passed: dict[tuple[str, str], bool] = {}
    for client, cells, good in outcomes:
        for cell in cells:
            passed[client, cell] = passed.get((client, cell), True) and good
    for (client, cell), good in passed.items():
        row = ran.get(client, {})
        kept = set(row["cells"]) if row.get("requirement") == ROWS[client].requirement else set[str]()
        kept = kept | {cell} if good else kept - {cell}
        ran[client] = {"requirement": ROWS[client].requirement, "cells": [one for one in CELLS if one in kept]}
    RAN.write_text(json.dumps({name: ran[name] for name in ROWS if name in ran}, indent=1) + "\n")
    write()


def write() -> None:
    """Put the table into the page."""
    if PAGE.exists():
        head, _, rest = PAGE.read_text().partition(_BEGIN)
        PAGE.write_text(f"{head}{_BEGIN}{rendered(json.loads(RAN.read_text()))}{_END}{rest.partition(_END)[2]}")


def written() -> str:
    """The table as the page has it."""
    return PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]


def rendered(ran: Ran) -> str:
    """The table in Markdown."""
    lines = [f"| client | version | {' | '.join(CELLS)} |", f"|---|---|{'---|' * len(CELLS)}"]
    for name, row in ran.items():
        empty = UNCLAIMED[name]
        first = row["requirement"].split()[0].removeprefix("@").replace("==", "@")
        version = first.rpartition("@")[2]
        cells = ["✓" if one in row["cells"] else empty.get(one, "") for one in CELLS]
        lines.append(f"| {name} | {version} | {' | '.join(cells)} |")
    causes = "; ".join(f"**{letter}** {cause}" for letter, cause in CAUSES.items())
    return "\n".join([*lines, "", f"The client {causes}."]) + "\n"


def claimed() -> dict[str, set[str]]:
    """The cells that tests claim, by row."""
    found: dict[str, set[str]] = {}
    for name in MODULES:
        module = importlib.import_module(f"tests.clients.{name}")
        for function in vars(module).values():
            for mark in _marks(getattr(function, "pytestmark", [])):
                client, cells = mark.args
                found.setdefault(client, set()).update(cells)
    return found


def _marks(given: Iterable[Any]) -> Iterator[pytest.Mark]:
    """Those of a test, and of its parameters."""
    for mark in given:
        if mark.name == "covers":
            yield mark
        elif mark.name == "parametrize":
            for one in mark.args[1]:
                yield from (mark for mark in getattr(one, "marks", ()) if mark.name == "covers")


if __name__ == "__main__":
    write()
