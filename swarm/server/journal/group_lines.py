"""The groups of an export as lines that ``swarm-gateway hooks test --data`` reads: what was asked, and the N answers.

Invariant: an answer is the very tokens that were sampled, decoded; a group with an episode that is no single answer, or
whose tokens are gone, is left out and counted.

Decoding cannot bring back what vLLM took out of an answer: stop strings of the caller's own are in its text, and so are
tool calls and reasoning, where a parser made them into fields.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from swarm.errors import ConfigError
from swarm.server.journal.codec import notes_of
from swarm.server.journal.episode_rows import Row
from swarm.server.journal.schema import reading


class Decode(Protocol):
    """A tokenizer's way back to text; ``special`` tokens are kept or left out."""

    def __call__(self, ids: list[int], *, special: bool) -> str: ...


@dataclass
class _Group:
    task_id: str
    prompt: str
    task: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: candidate, rank and reward of each answer
    answers: list[tuple[dict[str, Any], int | None, float | None]] = field(default_factory=lambda: [])
    broken: bool = False


class GroupLines:
    """A sink of export rows. A group is what one call of a reward hook judged (``group_id``), for clients that do not
    say so the episodes of one task in one batch.

    Groups keep their texts in memory until :meth:`close`: their episodes end in any order.

    Attributes:
        written: groups in the file, once it is closed.
        left_out: groups that are not.
    """

    def __init__(self, path: Path, decode: Decode) -> None:
        self._file = path.open("w", encoding="utf-8", errors="backslashreplace")
        self._decode = decode
        self._groups: dict[tuple[str, ...], _Group] = {}
        self.written = self.left_out = 0

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            if row["episode_type"] == "train":
                self._add(row)

    def close(self) -> None:
        with self._file:
            for group in self._groups.values():
                if group.broken:
                    self.left_out += 1
                    continue
                self.written += 1
                self._file.write(json.dumps(_line(group), ensure_ascii=False) + "\n")

    def _add(self, row: Row) -> None:
        key = (row["group_id"],) if row["group_id"] else (row["run_id"], row["batch_id"], row["task_id"])
        timelines: list[dict[str, Any]] = row["timelines"]
        if key not in self._groups:
            prompt = self._decode(timelines[0]["prompt_ids"], special=True) if timelines else ""
            self._groups[key] = _Group(row["task_id"], prompt)
        group = self._groups[key]
        if len(timelines) != 1 or row["num_calls"] != 1 or not row["finish_reason"]:
            group.broken = True
            return
        # what the gateway told of the task, see :mod:`gateway.rollout.submission`
        group.task = group.task or notes_of(row["output"] or {}).task or {}
        [timeline] = timelines
        candidate = {
            "text": self._decode(timeline["response_ids"], special=False),
            "finish_reason": row["finish_reason"],
            "prompt_tokens": len(timeline["prompt_ids"]),
            "completion_tokens": len(timeline["response_ids"]),
            "policy_version": timeline["max_policy_version"],
        }
        group.answers.append((candidate, row["rank"], row["reward"]))


def check_run(connection: sqlite3.Connection, run_id: str | None) -> None:
    """Raise :class:`ConfigError` if a run is named that the journal does not know."""
    if run_id is None:
        return
    runs = [name for (name,) in connection.execute("SELECT run_id FROM runs ORDER BY rowid")]
    if run_id not in runs:
        raise ConfigError(f"the journal has no run {run_id}; the latest runs are: {', '.join(runs[-5:]) or 'none'}")


def model_of(journal: Path, run_id: str | None = None) -> str:
    """The model whose tokens a journal holds, as its runs' jobs name it.

    Raises:
        ConfigError: there is no journal or no such run, it is empty or cannot be read, or its runs trained several
            models.
    """
    with reading(journal) as connection:
        check_run(connection, run_id)
        runs = connection.execute("SELECT run_id, job_yaml FROM runs ORDER BY rowid").fetchall()
    jobs: list[Any] = [yaml.safe_load(text) for name, text in runs if text and run_id in (None, name)]
    models = sorted({str(job["model"]) for job in jobs if isinstance(job, dict) and "model" in job})
    if len(models) != 1:
        named = f"are of {', '.join(models)}" if models else "name none"
        raise ConfigError(f"whose tokenizer? The runs of {journal} {named}: name the model with --tokenizer")
    return models[0]


def _line(group: _Group) -> dict[str, Any]:
    query, metadata = group.task.get("main_query"), group.task.get("metadata")
    ranks = [rank for _, rank, _ in group.answers]
    rewards = [reward for _, _, reward in group.answers if reward is not None]
    line: dict[str, Any] = {
        "task": {
            "task_id": group.task_id,
            "main_query": query if isinstance(query, str) else group.prompt,
            "init_messages": [{"role": "user", "content": group.prompt}],
            "metadata": metadata if isinstance(metadata, dict) else {},
        },
        "candidates": [candidate for candidate, _, _ in group.answers],
    }
    if None not in ranks:
        line["rank"] = ranks
    elif len(rewards) == len(ranks):
        line["rank"] = [1 + sum(other > reward for other in rewards) for reward in rewards]
    return line
