from __future__ import annotations

import sqlite3
from collections.abc import Generator
from pathlib import Path

import pytest

from swarm.server.journal.incoming import MAX_ROWS, Kind, Row, insert
from swarm.server.journal.schema import prepare


@pytest.fixture
def connection(tmp_path: Path) -> Generator[sqlite3.Connection]:
    connection = prepare(tmp_path / "journal.db")
    yield connection
    connection.close()


def claim(number: int) -> Row:
    return (Kind.CLAIM, number, f"e{number}", 1, "train", "client", "key", "", "", 1, b"digest", 240.0, 600.0, 1.5e9)


def end(number: int, data: bytes | None = None, clear: bool = False) -> Row:
    return (Kind.END, number, 1, number, "ended", 1.6e9, "t", 0.5, "{}", "", "end", data, clear)


def everything(connection: sqlite3.Connection) -> dict[str, list[Row]]:
    return {
        table: connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()
        for table in ("episodes", "keys", "calls", "trajectories")
    }


def test_each_row_goes_where_it_belongs(connection: sqlite3.Connection) -> None:
    insert(connection, [claim(7), (Kind.KEY, 7, 1, b"more"), (Kind.CALL, 3, 7, "call", b"tokens")])
    assert everything(connection) == {
        "episodes": [
            (7, "e7", 1, 0, "train", "client", "key", "", "", 1, b"digest", 240.0, 600.0, 1.5e9, "")
            + (None,) * 8
            + ("", "", None)
        ],
        "keys": [(7, 1, b"more")],
        "calls": [(3, 7, "call", b"tokens")],
        "trajectories": [],
    }
    insert(connection, [end(7, b"trajectory")])
    found = everything(connection)
    assert found["episodes"][0][3] == 1
    assert found["episodes"][0][15:23] == (7, "ended", 1.6e9, "t", 0.5, "{}", "", "end")
    assert found["trajectories"] == [(7, b"trajectory")]
    assert found["calls"] and found["keys"], "what the trajectory may refer to"


def test_rows_take_effect_in_their_order(connection: sqlite3.Connection) -> None:
    # claimed and ended before one commit: nothing that the end clears may come back after it
    insert(
        connection,
        [claim(1), (Kind.KEY, 1, 1, b"more"), (Kind.CALL, 1, 1, "call", b"tokens"), end(1, b"t", clear=True)],
    )
    found = everything(connection)
    assert found["episodes"][0][3] == 1
    assert (found["keys"], found["calls"], found["trajectories"]) == ([], [], [(1, b"t")])


def test_rows_inserted_again_change_nothing(connection: sqlite3.Connection) -> None:
    rows = [claim(1), (Kind.KEY, 1, 1, b"more"), (Kind.CALL, 1, 1, "call", b"tokens"), claim(2), end(2, b"t")]
    insert(connection, rows)
    first = everything(connection)
    insert(connection, rows)
    assert everything(connection) == first


@pytest.mark.parametrize("count", [*range(1, 18), MAX_ROWS - 1, MAX_ROWS])
def test_any_number_of_rows_is_one_statement_and_all_of_them(connection: sqlite3.Connection, count: int) -> None:
    statements: set[str] = set()
    connection.set_trace_callback(statements.add)
    insert(connection, [claim(number) for number in range(count)])
    connection.set_trace_callback(None)
    assert len(statements) == 1
    assert connection.execute("SELECT count(*), max(id) FROM episodes").fetchone() == (count, count - 1)


def test_a_row_that_is_refused_takes_all_along(connection: sqlite3.Connection) -> None:
    stateless = (Kind.END, 2, None, *end(2)[3:])
    with pytest.raises(sqlite3.IntegrityError):
        insert(connection, [claim(1), claim(2), (Kind.CALL, 1, 1, "call", b"tokens"), stateless])
    assert not connection.in_transaction
    assert everything(connection) == {"episodes": [], "keys": [], "calls": [], "trajectories": []}
