"""What real agents and SDKs send is taken: the bodies in ``recorded/`` are theirs, with long texts cut.

Recorded from the clients of ``tests/clients/environments.py`` at those versions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.dialects import ChatDialect, MessagesDialect, ResponsesDialect

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
DIALECTS = {dialect.path: dialect for dialect in (ChatDialect(), MessagesDialect(), ResponsesDialect(stored=True))}


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_requests_of_real_clients_are_accepted(file: Path) -> None:
    recorded = json.loads(file.read_text())
    path, given = recorded["path"], recorded["body"]
    counts = path == "/v1/messages/count_tokens"
    body = MessagesDialect().counted(given) if counts else DIALECTS[path].parse(given).body
    carried = list(_texts(body["messages"]))
    turns: list[Any] = given.get("messages") or given["input"]
    missing = [text for text in _texts(turns) if not any(text in other for other in carried)]
    assert not missing
    assert _functions(body) >= _functions(given)


def _texts(turns: list[Any]) -> list[str]:
    """What people, tools and the model said, whatever the dialect."""
    texts: list[str] = []
    for turn in turns:
        content = turn.get("content", turn.get("output"))
        if isinstance(content, str):
            texts.append(content)
        for part in content if isinstance(content, list) else []:
            texts += [part["text"]] if "text" in part else _texts([part])
        if isinstance(reasoning := turn.get("reasoning"), str):
            texts.append(reasoning)
    return texts


def _functions(body: dict[str, Any]) -> set[str]:
    """Names of the tools that the client itself runs."""
    found: set[str] = set()
    for tool in body.get("tools") or []:
        if "function" in tool:
            found.add(tool["function"]["name"])
        elif tool.get("type", "custom") in ("function", "custom"):
            found.add(tool["name"])
    return found
