"""Changes as SQL: one transaction each, in few statements, mostly in one; see :mod:`swarm.server.journal.incoming`.

Invariant: a transaction is written whole or not at all, and writing it again leaves the file as it was.
"""

from __future__ import annotations

import json
import sqlite3

from swarm.server.journal.incoming import MAX_ROWS, insert
from swarm.server.journal.ledger import OVER_REMEMBERED, Changes, Ledger, Live, Move, Run
from swarm.server.journal.schema import State

_RUNS = (
    "INSERT INTO runs (id, run_id, job_yaml, trained, dropped, quarantined, stopped) VALUES (?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (id) DO UPDATE SET job_yaml = excluded.job_yaml, trained = excluded.trained,"
    " dropped = excluded.dropped, quarantined = excluded.quarantined, stopped = excluded.stopped"
)
_BATCH = "INSERT OR REPLACE INTO batches (batch_id, members, attempts) VALUES (?, ?, ?)"
_LOSSES = "INSERT OR REPLACE INTO losses (task_id, lost, version) VALUES (?, ?, ?)"
_AGREEMENTS = "INSERT OR IGNORE INTO agreements (client_uuid) VALUES (?)"
_STEPS = "INSERT OR IGNORE INTO steps (run, batch_id, step, seconds, metrics) VALUES (?, ?, ?, ?, ?)"


def write_at_once(connection: sqlite3.Connection, changes: Changes) -> bool:
    """Write ``changes`` and commit them, unless that takes more than one statement: then nothing is done."""
    if len(changes.rows) > MAX_ROWS or not changes.only_rows:
        return False
    if changes.rows:
        insert(connection, changes.rows)
    return True


def write(connection: sqlite3.Connection, changes: Changes) -> None:
    """Write ``changes`` within the transaction that is open."""
    connection.executemany(_RUNS, changes.runs.values())
    for start in range(0, len(changes.rows), MAX_ROWS):
        insert(connection, changes.rows[start : start + MAX_ROWS])
    connection.executemany("UPDATE episodes SET quarantine_reason = ? WHERE id = ?", changes.quarantines)
    for move in changes.moves:
        _write_move(connection, move)
    for batch_id, row in changes.batches.items():
        if row is None:
            connection.execute("DELETE FROM batches WHERE batch_id = ?", (batch_id,))
        else:
            connection.execute(_BATCH, row)
    for batch_id, attempts in changes.attempts.items():
        connection.execute("UPDATE batches SET attempts = ? WHERE batch_id = ?", (attempts, batch_id))
    connection.executemany(_STEPS, changes.steps)
    for table, void in (("losses", changes.losses_void), ("agreements", changes.agreements_void)):
        if void:
            connection.execute(f"DELETE FROM {table}")
    if changes.losses:
        gone = [(task_id,) for task_id, row in changes.losses.items() if row is None]
        connection.executemany("DELETE FROM losses WHERE task_id = ?", gone)
        connection.executemany(_LOSSES, [row for row in changes.losses.values() if row is not None])
    connection.executemany(_AGREEMENTS, changes.agreements)


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
