"""What happens to episodes as one statement, whatever it is: rows for a view whose triggers put each where it belongs.

A statement that stands alone is a transaction of its own. Beside a busy event loop that is what makes a commit quick:
each further statement would wait for the interpreter's lock several times, and each wait takes longer than SQLite does.

Invariant: rows take effect in their order, all or none, and a second time they change nothing.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

Row = tuple[Any, ...]

#: most rows of one statement
MAX_ROWS = 128


class Kind(IntEnum):
    """What a row is: its first column. The others are, in this order:

    * ``CLAIM``: id, uuid, run, type, client_uuid, claim_key, task_hint, group_uuid, group_size, key_digest,
      idle_timeout, max_seconds, claimed_at of the episode
    * ``KEY``: episode, number, digest
    * ``CALL``: id, episode, call_id, data
    * ``END``: id, state, ended, how, ended_at, task_id, reward, output, drop_reason, end_key of the episode, data of
      its trajectory or ``None``, whether its calls and further keys are no longer needed
    """

    CLAIM = 0
    KEY = 1
    CALL = 2
    END = 3


#: columns of the view
_WIDTH = 14
#: name, kind and further condition, what is done
_TRIGGERS = (
    (
        "claim",
        f"NEW.kind = {Kind.CLAIM:d}",
        "INSERT OR IGNORE INTO episodes (id, uuid, run, type, client_uuid, claim_key, task_hint, group_uuid,"
        " group_size, key_digest, idle_timeout, max_seconds, claimed_at) VALUES (NEW.c1, NEW.c2, NEW.c3, NEW.c4,"
        " NEW.c5, NEW.c6, NEW.c7, NEW.c8, NEW.c9, NEW.c10, NEW.c11, NEW.c12, NEW.c13);",
    ),
    (
        "key",
        f"NEW.kind = {Kind.KEY:d}",
        "INSERT OR IGNORE INTO keys (episode, number, digest) VALUES (NEW.c1, NEW.c2, NEW.c3);",
    ),
    (
        "call",
        f"NEW.kind = {Kind.CALL:d}",
        "INSERT OR IGNORE INTO calls (id, episode, call_id, data) VALUES (NEW.c1, NEW.c2, NEW.c3, NEW.c4);",
    ),
    (
        "end",
        f"NEW.kind = {Kind.END:d}",
        "UPDATE episodes SET state = NEW.c2, ended = NEW.c3, how = NEW.c4, ended_at = NEW.c5, task_id = NEW.c6,"
        " reward = NEW.c7, output = NEW.c8, drop_reason = NEW.c9, end_key = NEW.c10 WHERE id = NEW.c1;",
    ),
    (
        "trajectory",
        f"NEW.kind = {Kind.END:d} AND NEW.c11 IS NOT NULL",
        "INSERT OR IGNORE INTO trajectories (ended, data) VALUES (NEW.c3, NEW.c11);",
    ),
    (
        "cleared",
        f"NEW.kind = {Kind.END:d} AND NEW.c12",
        "DELETE FROM calls WHERE episode = NEW.c1; DELETE FROM keys WHERE episode = NEW.c1;",
    ),
)


def attach(connection: sqlite3.Connection) -> None:
    """Make the view, which only this connection has."""
    columns = ", ".join(f"NULL AS c{number}" for number in range(1, _WIDTH))
    connection.execute(f"CREATE TEMP VIEW incoming AS SELECT NULL AS kind, {columns}")
    for name, condition, statements in _TRIGGERS:
        connection.execute(
            f"CREATE TEMP TRIGGER incoming_{name} INSTEAD OF INSERT ON incoming WHEN {condition} BEGIN {statements} END"
        )


def insert(connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
    """Write up to :data:`MAX_ROWS` rows as one statement, on a connection that :func:`attach` was given."""
    values: list[Any] = []
    for row in rows:
        values += row
        values += _MISSING[len(row)]
    size = _rounded(len(rows))
    values += _MISSING[0] * (size - len(rows))
    # "many": for a single execution Python asks for the last row's number, another wait for the interpreter's lock
    connection.executemany(_statement(size), (values,))


#: values to fill up a row of so many
_MISSING = [[None] * (_WIDTH - length) for length in range(_WIDTH + 1)]


def _rounded(rows: int) -> int:
    """So that few statements are ever compiled; a row of nothing but NULL is of no kind, and nothing is done."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


@functools.cache
def _statement(rows: int) -> str:
    row = ",".join("?" * _WIDTH)
    return "INSERT INTO incoming VALUES " + ",".join([f"({row})"] * rows)
