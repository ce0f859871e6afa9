"""Tables for terminals of any width: columns that matter least leave first, the widest shrink, nothing wraps.

Invariant: no line is wider than the width that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from textual.content import Content

from gateway.tui.swarm_text import DIM
from gateway.tui.words import number, short

_GAP = 2


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        title: its head.
        rank: of those with the highest rank the last leaves first where there is no room; 0 stays.
        align: of its cells and its head.
        most: cells that it takes at most; more is cut.
        least: cells below which it is not squeezed where it is to the left; numbers are never cut.
    """

    title: str
    rank: int = 0
    align: Literal["left", "right"] = "left"
    most: int = 40
    least: int = 10


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of one row, one for each column, and the style of all of it."""

    cells: Sequence[str]
    style: str = ""


def lines(columns: Sequence[Column], rows: Sequence[Row], width: int) -> list[Content]:
    """The head and the rows, each at most ``width`` cells wide."""
    texts = [[short(cell, column.most) for cell, column in zip(row.cells, columns, strict=True)] for row in rows]
    widths = [
        max([cell_len(column.title), *(cell_len(row[place]) for row in texts)]) for place, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    while len(kept) > 1 and _total(kept, _squeezed(columns, kept, widths)) > width:
        most = max(columns[place].rank for place in kept)
        if most == 0:
            break
        kept.remove([place for place in kept if columns[place].rank == most][-1])
    widths = _fitting(columns, kept, widths, width)
    made = [Content.styled(_line(columns, kept, widths, [column.title for column in columns], width), "bold")]
    made += [
        Content.styled(_line(columns, kept, widths, text, width), row.style)
        for text, row in zip(texts, rows, strict=True)
    ]
    return made


def counted(columns: Sequence[Column], counts: Mapping[str, Mapping[str, int]], width: int) -> list[Content]:
    """A table below each title: how often and what, the most frequent first; nothing of what was never counted.

    Args:
        columns: those two.
        counts: by title and by what.
    """
    made: list[Content] = []
    for title, of_title in counts.items():
        if of_title:
            ordered = sorted(of_title.items(), key=lambda item: -item[1])
            table = lines(columns, [Row((number(count), what)) for what, count in ordered], width)
            # the head is the same each time and says nothing that the title does not
            made += [Content.styled(title, DIM), *table[1:], Content("")]
    return made[:-1]


def _total(kept: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[place] for place in kept) + _GAP * (len(kept) - 1)


def _squeezed(columns: Sequence[Column], kept: Sequence[int], widths: Sequence[int]) -> list[int]:
    """The least widths of columns of names; numbers are not cut."""
    return [
        min(width, columns[place].least) if place in kept and columns[place].align == "left" else width
        for place, width in enumerate(widths)
    ]


def _fitting(columns: Sequence[Column], kept: Sequence[int], widths: Sequence[int], width: int) -> list[int]:
    """``widths`` with the widest names made narrower, a cell at a time, until they fit or nothing gives way."""
    fitted = list(widths)
    while _total(kept, fitted) > width:
        names = [place for place in kept if columns[place].align == "left" and fitted[place] > columns[place].least]
        if not names:
            break
        fitted[max(names, key=lambda place: fitted[place])] -= 1
    return fitted


def _line(
    columns: Sequence[Column], kept: Sequence[int], widths: Sequence[int], cells: Sequence[str], width: int
) -> str:
    parts: list[str] = []
    for place in kept:
        text = short(cells[place], widths[place])
        room = " " * (widths[place] - cell_len(text))
        parts.append(room + text if columns[place].align == "right" else text + room)
    return short((" " * _GAP).join(parts).rstrip(), width)
