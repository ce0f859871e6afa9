"""Changes as SQL: one transaction each, in few statements, because every statement waits for the interpreter's lock.

Invariant: a transaction is written whole or not at all, and writing it again leaves the file as it was.
"""

from __future__ import annotations

import functools
import itertools
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from swarm.server.journal.ledger import OVER_REMEMBERED, Changes, Ledger, Live, Move, Row, Rows, Run
from swarm.server.journal.schema import State

#: Up to so many rows any number is one statement; more are taken in multiples of it, so that few are ever compiled.
_FEW_ROWS = 16
_MAX_ROWS = 128


@dataclass(frozen=True, slots=True)
class _Bulk:
    """A statement whose VALUES take any number of rows of ``width`` columns."""

    head: str
    width: int
    tail: str = ""

    def run(self, connection: sqlite3.Connection, rows: Rows) -> None:
        for chunk in _chunks(rows):
            connection.execute(_statement(self, len(chunk)), list(itertools.chain.from_iterable(chunk)))


@functools.cache
def _statement(bulk: _Bulk, rows: int) -> str:
    marks = ",".join([f"({','.join('?' * bulk.width)})"] * rows)
    return f"{bulk.head} {marks}{bulk.tail}"


_RUNS = _Bulk(
    "INSERT INTO runs (id, run_id, job_yaml, trained, dropped, quarantined, stopped) VALUES",
    7,
    " ON CONFLICT (id) DO UPDATE SET job_yaml = excluded.job_yaml, trained = excluded.trained,"
    " dropped = excluded.dropped, quarantined = excluded.quarantined, stopped = excluded.stopped",
)
_CLAIMS = _Bulk(
    "INSERT OR IGNORE INTO episodes (id, uuid, run, type, client_uuid, claim_key, task_hint, group_uuid, group_size,"
    " key_digest, idle_timeout, max_seconds, claimed_at) VALUES",
    13,
)
_KEYS = _Bulk("INSERT OR IGNORE INTO keys (episode, number, digest) VALUES", 3)
_CALLS = _Bulk("INSERT OR IGNORE INTO calls (id, episode, call_id, data) VALUES", 4)
_ENDS = _Bulk(
    "UPDATE episodes SET state = v.column2, ended = v.column3, how = v.column4, ended_at = v.column5,"
    " task_id = v.column6, reward = v.column7, output = v.column8, drop_reason = v.column9, end_key = v.column10"
    " FROM (VALUES",
    10,
    ") AS v WHERE episodes.id = v.column1",
)
_TRAJECTORIES = _Bulk("INSERT OR IGNORE INTO trajectories (ended, data) VALUES", 2)
_BATCHES = _Bulk("INSERT OR REPLACE INTO batches (batch_id, members, attempts) VALUES", 3)
_LOSSES = _Bulk("INSERT OR REPLACE INTO losses (task_id, lost, version) VALUES", 3)
_AGREEMENTS = _Bulk("INSERT OR IGNORE INTO agreements (client_uuid) VALUES", 1)
_STEPS = _Bulk("INSERT OR IGNORE INTO steps (run, batch_id, step, seconds, metrics) VALUES", 5)


def write(connection: sqlite3.Connection, changes: Changes) -> None:
    """Write ``changes`` within the transaction that is open."""
    _RUNS.run(connection, list(changes.runs.values()))
    _CLAIMS.run(connection, changes.claims)
    _KEYS.run(connection, changes.keys)
    _CALLS.run(connection, changes.calls)
    connection.executemany("UPDATE episodes SET quarantine_reason = ? WHERE id = ?", changes.quarantines)
    _ENDS.run(connection, changes.ends)
    _TRAJECTORIES.run(connection, changes.trajectories)
    if changes.cleared:
        ids = json.dumps(changes.cleared)
        for table in ("calls", "keys"):
            connection.execute(f"DELETE FROM {table} WHERE episode IN (SELECT value FROM json_each(?))", (ids,))
    for move in changes.moves:
        _write_move(connection, move)
    for batch_id, row in changes.batches.items():
        if row is None:
            connection.execute("DELETE FROM batches WHERE batch_id = ?", (batch_id,))
        else:
            _BATCHES.run(connection, [row])
    for batch_id, attempts in changes.attempts.items():
        connection.execute("UPDATE batches SET attempts = ? WHERE batch_id = ?", (attempts, batch_id))
    _STEPS.run(connection, changes.steps)
    for table, void in (("losses", changes.losses_void), ("agreements", changes.agreements_void)):
        if void:
            connection.execute(f"DELETE FROM {table}")
    if changes.losses:
        gone = [(task_id,) for task_id, row in changes.losses.items() if row is None]
        connection.executemany("DELETE FROM losses WHERE task_id = ?", gone)
        _LOSSES.run(connection, [row for row in changes.losses.values() if row is not None])
    _AGREEMENTS.run(connection, changes.agreements)


def _write_move(connection: sqlite3.Connection, move: Move) -> None:
    if move.state is State.DROPPED:
        # of a dropped batch its episodes keep the name
        assignments, values = "lost_reason = ?", [move.lost_reason]
    else:
        assignments, values = "batch_id = ?, step = ?", [move.batch_id, move.step]
    connection.execute(
        f"UPDATE episodes SET state = ?, {assignments} WHERE id IN (SELECT value FROM json_each(?))",
        [int(move.state), *values, json.dumps(move.ids)],
    )


def load(connection: sqlite3.Connection) -> Ledger:
    """The live part of a journal as it stands."""
    one = connection.execute
    last = [one(f"SELECT coalesce(max({key}), 0) FROM {table}").fetchone()[0] for table, key in _NUMBERED]
    ledger = Ledger(last_episode=last[0], last_ended=last[1], last_call=last[2])
    run = one(
        "SELECT id, run_id, job_yaml, trained, dropped, quarantined, stopped FROM runs ORDER BY id DESC LIMIT 1"
    ).fetchone()
    if run is not None:
        ledger.run = Run(*run[:-1], stopped=bool(run[-1]))
    names: dict[int, str] = {}
    for number, uuid, state, kind, quarantined in one(
        "SELECT id, uuid, state, type, quarantine_reason != '' FROM episodes WHERE state < 3 ORDER BY id"
    ):
        ledger.live[uuid] = Live(number, kind == "train", State(state), bool(quarantined))
        names[number] = uuid
    claimed = "episode IN (SELECT id FROM episodes WHERE state = 0)"
    for number, call_id in one(f"SELECT episode, call_id FROM calls WHERE {claimed}"):
        ledger.live[names[number]].call_ids.add(call_id)
    for number, digest in one("SELECT episode, digest FROM keys"):
        ledger.live[names[number]].digests.add(digest)
    batch = one("SELECT batch_id, members FROM batches").fetchone()
    if batch is not None:
        members = [uuid for _, uuids in json.loads(batch[1]) for uuid in uuids]
        ledger.batch_id = batch[0]
        ledger.batch = {uuid: None for uuid in members if uuid in ledger.live and ledger.live[uuid].state is State.OUT}
    latest = one(
        "SELECT uuid FROM episodes WHERE state >= 3 ORDER BY ended DESC LIMIT ?", (OVER_REMEMBERED,)
    ).fetchall()
    ledger.recent = {uuid: None for (uuid,) in reversed(latest)}
    ledger.over = one("SELECT count(*) FROM episodes").fetchone()[0] - len(ledger.live)
    return ledger


_NUMBERED = (("episodes", "id"), ("episodes", "ended"), ("calls", "id"))


def _chunks(rows: Rows) -> Iterator[list[Row]]:
    start = 0
    while start < len(rows):
        left = len(rows) - start
        size = left if left <= _FEW_ROWS else min(_MAX_ROWS, left // _FEW_ROWS * _FEW_ROWS)
        yield rows[start : start + size]
        start += size
