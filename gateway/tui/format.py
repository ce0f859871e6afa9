"""Plain data and text of the monitor and of the status commands: numbers, names, tables and lines.

Invariant: text from a server holds no character that could command the terminal once it went through :func:`short` or
:func:`printable`, and everything here fits the width that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size

from swarm.types import StepResult

REWARD = "swarm/reward_mean"
RESPONSE_TOKENS = "swarm/response_tokens_mean"

#: Stands for an unknown number.
UNKNOWN = "-"
#: Styles, as textual's markup names them.
GOOD, WARNING, BAD, DIM, ACCENT = "$text-success", "bold $text-warning", "bold $text-error", "dim", "bold $text-accent"
_FULL, _EMPTY = "█", "░"


@dataclass(frozen=True, slots=True)
class Row:
    """One cell per column, and a style for the whole row."""

    cells: Sequence[str]
    style: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under the titles of their columns; a title that begins with ``>`` aligns its column to the right."""

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
    """What one status shows.

    Attributes:
        state, version, batch, now: cells of the overview.
        head: lines above the panels.
        tables: by the key of their panel.
    """

    state: str
    version: str
    batch: str
    now: str
    head: Sequence[Line]
    tables: Mapping[str, Table] = field(default_factory=dict[str, Table])


def counts_table(heads: tuple[str, str], counts: Mapping[str, Mapping[str, int]], empty: str) -> Table:
    """Counts under their titles, the most frequent first; titles without counts are left out.

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
    lines: list[str] = []
    for row in rows:
        sides = zip(row, widths, table.columns, strict=True)
        cells = (cell.rjust(width) if title.startswith(">") else cell.ljust(width) for cell, width, title in sides)
        lines.append("  ".join(cells).rstrip())
    more = len(table.rows) - most
    return [*lines, f"... and {more} more"] if more > 0 else lines


def printable(text: str) -> str:
    """``text`` on one line without control characters, which could command the operator's terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def short(text: str, width: int) -> str:
    """``text``, printable, in at most ``width`` cells; a cut text ends in ``…``."""
    clean = printable(text)
    if cell_len(clean) <= width:
        return clean
    return set_cell_size(clean, width - 1).rstrip() + "…" if width > 0 else ""


def step_line(step: StepResult) -> str:
    """``step 12  reward 0.412  9.8 s  43 tokens``; values that the engine did not report are left out."""
    parts = [f"step {step.step:>4}"]
    if REWARD in step.metrics:
        parts.append(f"reward {step.metrics[REWARD]:.3f}")
    parts.append(f"{step.seconds:.1f} s")
    if RESPONSE_TOKENS in step.metrics:
        parts.append(f"{step.metrics[RESPONSE_TOKENS]:.0f} tokens/answer")
    return "  ".join(parts)


def seconds(value: float) -> str:
    """``0.4 s``, ``12 s``, ``3m 12s``, ``2h 05m``, ``3d 04h``; :data:`UNKNOWN` for infinities."""
    if not math.isfinite(value):
        return UNKNOWN
    value = max(0.0, value)
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def number(value: float) -> str:
    """Counts in about four characters: ``999``, ``12.3k``, ``4.5M``, ``2.1G``."""
    for least, unit, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.1f}{name}"
    return f"{value:.0f}"


def measure(value: float) -> str:
    """A metric in at most eight characters, with three significant digits: ``0.412``, ``43.1``, ``1.2e-06``."""
    if value == 0:
        return "0"
    size = abs(value)
    if not 1e-3 <= size < 1e5:
        return f"{value:.1e}"
    return f"{value:.0f}" if size >= 1e3 else f"{value:.3g}"


def byte_size(count: float) -> str:
    """Bytes as ``512 B``, ``2.1 MB``, by powers of a thousand."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def share(part: float, whole: float) -> str:
    """``37%``; :data:`UNKNOWN` of nothing."""
    return f"{100 * part / whole:.0f}%" if whole > 0 else UNKNOWN


def bar(done: float, total: float, width: int) -> str:
    """A bar of ``width`` cells: its last is full only at the total, its first from the beginning."""
    if total <= 0 or width <= 0:
        return _EMPTY * width
    part = min(max(done / total, 0.0), 1.0)
    full = int(part * width)
    if part > 0:
        full = max(full, 1)
    if part < 1:
        full = min(full, width - 1)
    return _FULL * full + _EMPTY * (width - full)
