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
from swarm.server.journal.codec import (
    STATE_NAMES,
    clean,
    finish_reason_of,
    notes_of,
    unpack_counts,
    unpack_trajectory,
)
from swarm.server.journal.erasure import find
from swarm.server.journal.schema import reading
from swarm.states import EpisodeState
from swarm.subjects import Subject
from swarm.tokens import as_lists

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-")
#: episodes read at once
_READ_ROWS = 64

_COLUMNS = (
    "e.rowid, length(t.data) + coalesce(length(c.data), 0), e.uuid, e.run_id, e.state, e.type, e.client_uuid,"
    " e.group_uuid, e.task_id, e.reward,"
    " e.output, e.how, coalesce(nullif(e.drop_reason, ''), e.lost_reason), e.quarantine_reason, e.batch_id, e.step,"
    " e.claimed_at, e.ended_at, e.tokens, t.data, c.data"
)
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
        for _, size, *values in rows:
            yield size or 0, _row(*values)


def _row(
    episode_uuid: str,
    run_id: str,
    state: EpisodeState,
    episode_type: str,
    client_uuid: str,
    group_uuid: str,
    task_id: str | None,
    reward: float | None,
    output: str | None,
    how: str,
    drop_reason: str,
    quarantine_reason: str,
    batch_id: str,
    step: int | None,
    claimed_at: float,
    ended_at: float,
    tokens: bytes | None,
    data: bytes | None,
    call: bytes | None,
) -> Row:
    trajectory = None if data is None else unpack_trajectory(episode_uuid, data, call)
    timelines = [] if trajectory is None else trajectory.timelines
    result: dict[str, Any] = {} if output is None else json.loads(output)
    notes = notes_of(result)
    return {
        "episode_uuid": episode_uuid,
        "run_id": run_id,
        "state": STATE_NAMES.get(state, state),
        "episode_type": episode_type,
        "client_uuid": client_uuid,
        "group_uuid": group_uuid,
        "task_id": task_id or "",
        "group_id": clean(notes.group_id),
        "hook": clean(notes.hook),
        "code": clean(notes.code),
        "request_id": clean(notes.request_id),
        "trace_id": _trace_id(notes.traceparent),
        "reward": reward,
        "rank": notes.rank,
        "components": components_of(result.get("log_metrics") or {}),
        "reason": clean(notes.reason),
        "output": None if output is None else result,
        "how": how,
        "drop_reason": drop_reason,
        "quarantine_reason": quarantine_reason,
        "batch_id": batch_id,
        "step": step,
        "min_policy_version": min((timeline.min_policy_version for timeline in timelines), default=None),
        "max_policy_version": max((timeline.max_policy_version for timeline in timelines), default=None),
        "claimed_at": claimed_at,
        "ended_at": ended_at,
        "tokens": structs.asdict(unpack_counts(tokens)),
        "num_calls": 0 if trajectory is None else trajectory.num_calls,
        "finish_reason": "" if call is None or trajectory is None else finish_reason_of(call),
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
