"""The table of clients says what tests ran, and nothing else."""

from __future__ import annotations

import json

from tests.clients import table


def test_the_page_has_the_cells_that_passed_at_these_versions() -> None:
    ran = json.loads(table.RAN.read_text())
    assert table.written() == table.rendered(ran), "python -m tests.clients.table"
    assert {name: row["requirement"] for name, row in ran.items()} == {
        name: table.ROWS[name].requirement for name in ran
    }, "make test-clients"


def test_every_row_and_cell_is_some_tests() -> None:
    claimed = table.claimed()
    assert set(claimed) == set(table.ROWS) == set(table.UNCLAIMED)
    for name, causes in table.UNCLAIMED.items():
        assert claimed[name].isdisjoint(causes) and claimed[name] | set(causes) == set(table.CELLS), name
        assert set(causes.values()) <= set(table.CAUSES)
    for name, row in json.loads(table.RAN.read_text()).items():
        assert set(row["cells"]) <= claimed[name], name
