"""Text of the monitor and of the status commands: numbers, tables and lines, without textual.

Invariant: no text from a server keeps a character that could command the terminal after :func:`short` or
:func:`printable`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from rich.cells import cell_len, set_cell_size

T = TypeVar("T")
#: Title of a column -> its cell of an item; a title that begins with ``>`` aligns its column to the right.
Columns = Mapping[str, Callable[[T], str]]

#: A tab, and blanks that only Python does not call printable.
_BLANK = re.compile("[\t\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
#: Stands for an unknown number.
UNKNOWN = "-"
#: Styles, as textual's markup names them.
GOOD, WARNING, BAD, DIM, ACCENT = "$text-success", "bold $text-warning", "bold $text-error", "dim", "bold $text-accent"


@dataclass(frozen=True, slots=True)
class Row:
    """One cell per column, and a style for the whole row."""

    cells: Sequence[str]
    style: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under the titles of their columns, see :data:`Columns`."""

    columns: Sequence[str]
    rows: Sequence[Row]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A labelled line of text; ``minor`` lines are left out where there is little room."""

    text: str
    style: str = ""
    label: str = ""
    label_style: str = DIM
    minor: bool = False


@dataclass(frozen=True)
class View:
    """What the monitor shows of one status.

    Attributes:
        state, version, batch, now, reward: cells of the overview.
        head: lines above the panels.
        tables: by the key of their panel, of one with two by their names.
        last_lines: of a dead engine's output.
    """

    state: str
    version: str
    batch: str
    now: str
    reward: str
    head: Sequence[Line]
    tables: Mapping[str, Table]
    last_lines: Sequence[str] = ()


def table_of(
    columns: Columns[T],
    items: Iterable[T],
    style: Callable[[T], str] = lambda item: "",
    note: str = "",
    empty: str = "",
) -> Table:
    """One row per item; the note is ``empty`` if there are no rows."""
    rows = [Row([cell(item) for cell in columns.values()], style(item)) for item in items]
    return Table(list(columns), rows, note if rows else empty)


def counts_table(heads: tuple[str, str], counts: Mapping[str, Mapping[str, int]], empty: str) -> Table:
    """Counts (by title, then by name) under their titles, the most frequent first; without titles that have none.

    Args:
        heads: of the columns of numbers and of names.
        counts: by title and by name.
        empty: the note of a table without rows.
    """
    rows: list[Row] = []
    for title, of_title in counts.items():
        if of_title:
            rows.append(Row(("", title), DIM))
            ordered = sorted(of_title.items(), key=lambda item: -item[1])
            rows += [Row((number(count), name)) for name, count in ordered]
    return Table((f">{heads[0]}", heads[1]), rows, "" if rows else empty)


def text_lines(table: Table, most: int) -> list[str]:
    """The first ``most`` rows of ``table`` under its titles, as text."""
    rows = [[title.removeprefix(">") for title in table.columns], *(row.cells for row in table.rows[:most])]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    rights = [title.startswith(">") for title in table.columns]
    lines = ["  ".join(map(_padded, row, rights, widths)).rstrip() for row in rows]
    more = len(table.rows) - most
    return [*lines, f"... and {more} more"] if more > 0 else lines


def _padded(text: str, right: bool, width: int) -> str:
    blanks = " " * (width - cell_len(text))
    return blanks + text if right else text + blanks


def printable(text: str) -> str:
    """``text`` on one line, the ends of its lines as ``⏎``, without control characters, which could command the
    operator's terminal."""
    line = _BLANK.sub(" ", text.replace("\r\n", "\n").replace("\n", "\N{RETURN SYMBOL}"))
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def short(text: str, width: int) -> str:
    """``text``, printable, in at most ``width`` cells; a cut text ends in ``…``."""
    clean = printable(text)
    if cell_len(clean) <= width:
        return clean
    return set_cell_size(clean, width - 1).rstrip() + "…" if width > 0 else ""


def seconds(value: float) -> str:
    """``0.4 s``, ``12 s``, ``3m 12s``, ``2h 05m``, ``3d 04h``; :data:`UNKNOWN` for infinities."""
    if not math.isfinite(value):
        return UNKNOWN
    if value < 9.95:
        return f"{max(0.0, value):.1f} s"
    whole = round(value)
    for size, name, part, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{name} {whole % size // part:02d}{part_name}"
    return f"{whole} s"


def number(value: float) -> str:
    """Counts in about four characters: ``999``, ``12.3k``, ``4.5M``, ``2.1G``."""
    for least, unit, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.1f}{name}"
    return f"{value:.0f}"


def measure(value: float) -> str:
    """A metric with three significant digits, or as a whole number: ``0.412``, ``43.1``, ``5679``, ``1.24e-06``."""
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e5 else f"{value:.3g}"


def percent(part: float, whole: float) -> str:
    """``37%``, see :func:`share`; :data:`UNKNOWN` of nothing."""
    # what it stands beside needs pydantic, for which no error message waits
    from swarm.progress import share

    return share(part / whole) if whole > 0 else UNKNOWN


def bar(done: float, total: float, width: int) -> str:
    """A bar of ``width`` cells: its last is full only at the total, its first from the beginning."""
    part = min(max(done / total, 0.0), 1.0) if total > 0 else 0.0
    full = 0 if part == 0 else width if part == 1 else min(max(int(part * width), 1), width - 1)
    return "█" * full + "░" * (width - full)


def curve(values: Sequence[float], width: int) -> str:
    """``values`` as at most ``width`` blocks, each as high as the mean of its share of them."""
    low, span, count = min(values), max(values) - min(values), len(values)
    cells = min(width, count)
    means = [fmean(values[at * count // cells : (at + 1) * count // cells]) for at in range(cells)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (mean - low) / span)) if span else 0] for mean in means)
