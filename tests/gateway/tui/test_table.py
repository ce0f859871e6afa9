"""Tables: what leaves and what shrinks where there is little room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.tui.table import Column, Row, lines

COLUMNS = (
    Column("name", most=20),
    Column("count", align="right"),
    Column("least", rank=2),
    Column("less", rank=1, align="right"),
)
ROWS = [Row(("a name that is long, too long", "12", "x", "3.4 s")), Row(("short", "7", "yy", "12 s"), "bold")]


def told(width: int) -> list[str]:
    return [line.plain for line in lines(COLUMNS, ROWS, width)]


def test_numbers_stand_to_the_right_and_long_names_are_cut() -> None:
    assert told(80) == [
        "name                  count  least   less",
        "a name that is long…     12  x      3.4 s",
        "short                     7  yy      12 s",
    ]


def test_the_highest_rank_leaves_first_and_then_names_shrink() -> None:
    assert told(30)[0].split() == ["name", "count", "less"]
    assert told(24)[0].split() == ["name", "count", "less"]
    assert told(22)[0].split() == ["name", "count"]
    assert told(17)[1] == "a name th…     12"


def test_a_row_keeps_its_style() -> None:
    assert [span.style for span in lines(COLUMNS, ROWS, 80)[2].spans] == ["bold"]


@given(st.lists(st.tuples(*[st.text(max_size=30)] * 4), max_size=5), st.integers(1, 90))
def test_no_line_is_wider_than_the_terminal(rows: list[tuple[str, str, str, str]], width: int) -> None:
    made = lines(COLUMNS, [Row(cells) for cells in rows], width)
    assert len(made) == len(rows) + 1
    assert all(line.cell_length <= width for line in made)
