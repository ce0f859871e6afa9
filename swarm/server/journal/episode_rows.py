"""The episodes of a journal as rows of JSON, read beside the server that writes it.

Invariant: the journal is only read, in short transactions, so that its log is never held back.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from msgspec import structs

from swarm.measures import components_of
from swarm.server.journal.erasure import find
from swarm.server.journal.schema import reading
from swarm.server.journal.sqlite import (
    clean,
    finish_reason_of,
    notes_of,
    state_name,
    unpack_counts,
    unpack_trajectory,
)
from swarm.subjects import Subject
from swarm.tokens import as_lists

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-")
#: episodes read at once
_READ_ROWS = 64

#: The fields of a row in their order, and where each is; ``NULL``: :func:`_row` fills it in.
_FIELDS = {
    "episode_uuid": "e.uuid",
    "run_id": "e.run_id",
    "state": "e.state",
    "episode_type": "e.type",
    "client_uuid": "e.client_uuid",
    "group_uuid": "e.group_uuid",
    "task_id": "coalesce(e.task_id, '')",
    **dict.fromkeys(("group_id", "hook", "code", "request_id", "trace_id"), "NULL"),
    "reward": "e.reward",
    **dict.fromkeys(("rank", "components", "reason"), "NULL"),
    "output": "e.output",
    "how": "e.how",
    "drop_reason": "coalesce(nullif(e.drop_reason, ''), e.lost_reason)",
    "quarantine_reason": "e.quarantine_reason",
    "batch_id": "e.batch_id",
    "step": "e.step",
    **dict.fromkeys(("min_policy_version", "max_policy_version"), "NULL"),
    "claimed_at": "e.claimed_at",
    "ended_at": "e.ended_at",
    "tokens": "e.tokens",
}
ROW_FIELDS = (*_FIELDS, "num_calls", "finish_reason", "timelines")
_COLUMNS = f"e.rowid, length(t.data) + coalesce(length(c.data), 0), t.data, c.data, {', '.join(_FIELDS.values())}"
_FROM = (
    "FROM episodes e LEFT JOIN trajectories t ON t.episode = e.uuid LEFT JOIN calls c ON c.episode = e.uuid"
    " AND e.ended IS NOT NULL"
)

Row = dict[str, Any]


def rows_of(journal: Path, subject: Subject) -> list[Row]:
    """The rows of all episodes of ``subject`` that are over; JSON has a number for all of their values."""
    with reading(journal) as connection:
        names = json.dumps([match.uuid for match in find(connection, subject)])
        condition = "e.uuid IN (SELECT value FROM json_each(?))"
        return [finite(row) for _, row in episode_rows(connection, condition, (names,))]


def episode_rows(
    connection: sqlite3.Connection, condition: str, named: tuple[str, ...] = ()
) -> Generator[tuple[int, Row]]:
    """Rows with the size of their token data. Each read is a transaction of its own."""
    after = 0
    while True:
        rows = connection.execute(
            f"SELECT {_COLUMNS} {_FROM} WHERE {condition} AND e.rowid > ? ORDER BY e.rowid LIMIT {_READ_ROWS}",
            (*named, after),
        ).fetchall()
        if not rows:
            return
        after = rows[-1][0]
        for _, size, data, call, *values in rows:
            yield size or 0, _row(dict(zip(_FIELDS, values, strict=True)), data, call)


def _row(row: Row, data: bytes | None, call: bytes | None) -> Row:
    """``row`` with what is packed in it: the output, and the trajectory, whose tokens may be in its ``call``."""
    trajectory = None if data is None else unpack_trajectory(row["episode_uuid"], data, call)
    timelines = [] if trajectory is None else trajectory.timelines
    result: dict[str, Any] = {} if row["output"] is None else json.loads(row["output"])
    notes = notes_of(result)
    return row | {
        "state": state_name(row["state"]),
        "group_id": clean(notes.group_id),
        "hook": clean(notes.hook),
        "code": clean(notes.code),
        "request_id": clean(notes.request_id),
        "trace_id": _trace_id(notes.traceparent),
        "rank": notes.rank,
        "components": components_of(result.get("log_metrics") or {}),
        "reason": clean(notes.reason),
        "output": None if row["output"] is None else result,
        "min_policy_version": min((timeline.min_policy_version for timeline in timelines), default=None),
        "max_policy_version": max((timeline.max_policy_version for timeline in timelines), default=None),
        "tokens": structs.asdict(unpack_counts(row["tokens"])),
        "num_calls": 0 if trajectory is None else trajectory.num_calls,
        "finish_reason": "" if trajectory is None else finish_reason_of(call),
        "timelines": [as_lists(timeline) for timeline in timelines],
    }


def _trace_id(traceparent: str) -> str:
    """Of the trace of the request that the episode was for: https://www.w3.org/TR/trace-context/#traceparent-header."""
    match = _TRACEPARENT.match(traceparent)
    return match[1] if match else ""


def finite(value: Any) -> Any:
    """``value`` (JSON) with null for what JSON has no number for."""
    match value:
        case dict():
            return {key: finite(item) for key, item in cast("dict[str, Any]", value).items()}
        case list():
            return [finite(item) for item in cast("list[Any]", value)]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value
