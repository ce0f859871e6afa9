"""Recorded groups: answers to one request, with a known order or without, one JSON object per line.

Invariant: every line becomes a group or an error that names file and line.

A line in short and in full form::

    {"prompt": "2+2?", "candidates": ["4", "five"], "rank": [1, 2]}
    {"task": {"task_id": "t1", "main_query": "2+2?"}, "candidates": [{"message": {...}, "completion_tokens": 2}, ...]}

``rank`` has one number per candidate, 1 for the best; equal numbers are ties.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, cast

from pydantic import Field, FiniteFloat, model_validator

from reward_hooks.contract import Candidate, texts_of
from swarm.errors import ConfigError
from swarm.types import Model, Task
from swarm.validation import validated


class RecordedGroup(Model):
    """N answers to one task; ``rank`` is their known order, if any (1 is best)."""

    task: Task
    candidates: list[Candidate] = Field(min_length=1)
    rank: list[FiniteFloat] | None = None

    @model_validator(mode="after")
    def _one_rank_each(self) -> Self:
        if self.rank is not None and len(self.rank) != len(self.candidates):
            raise ValueError(f"rank has {len(self.rank)} numbers for {len(self.candidates)} candidates")
        return self


def read_groups(path: Path) -> Iterator[RecordedGroup]:
    """The groups of a JSON Lines file, one at a time; blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is no group.
    """
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _group(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the groups {path}: {getattr(exc, 'strerror', None) or exc}") from exc


def _group(line: str, where: str) -> RecordedGroup:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{where}: no JSON: {exc}") from exc
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: must be a JSON object, got {type(row).__name__}")
    fields = dict(cast("dict[str, Any]", row))
    if "candidates" not in fields:
        raise ConfigError(f"{where}: has no candidates; a hook ranks recorded answers, so add a list of them")
    prompt = fields.pop("prompt", None)
    if "task" not in fields:
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(f"{where}: says nothing of what was asked; add a prompt (text) or a task (object)")
        digest = hashlib.sha256(line.encode()).hexdigest()[:16]
        messages = [{"role": "user", "content": prompt}]
        fields["task"] = {"task_id": digest, "main_query": prompt, "init_messages": messages}
    listed: Any = fields.get("candidates")
    if isinstance(listed, list):
        fields["candidates"] = [
            _candidate(candidate, index) for index, candidate in enumerate(cast("list[Any]", listed))
        ]
    return validated(RecordedGroup, fields, where)


def _candidate(value: object, index: int) -> object:
    """Expand the short forms: a string is an answer's text, ``index`` is the place in the list, and of ``message`` and
    of its text and calls either is made from the other."""
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, Mapping):
        return value
    fields = dict(cast("Mapping[str, Any]", value))
    fields.setdefault("index", index)
    message: Any = fields.get("message")
    if isinstance(message, dict):
        message = cast("dict[str, Any]", message)
        fields = {"text": "".join(texts_of(message)), "tool_calls": message.get("tool_calls") or [], **fields}
    elif "message" not in fields:
        calls = {"tool_calls": fields["tool_calls"]} if fields.get("tool_calls") else {}
        fields["message"] = {"role": "assistant", "content": fields.get("text", ""), **calls}
    return fields
