"""Numbers and names as the monitor writes them.

Invariant: what comes from a server holds no character that could command the terminal, and every bar and shortened name
has exactly the width that was asked for, or less.
"""

from __future__ import annotations

import math

from rich.cells import cell_len, set_cell_size

from gateway.cli.status import printable

#: what stands where a number is not known
UNKNOWN = "-"
_FULL, _EMPTY = "█", "░"


def seconds(value: float) -> str:
    """``0.4 s``, ``12 s``, ``3m 12s``, ``2h 05m``, ``3d 04h``; whole seconds from ten on.

    What is not finite is :data:`UNKNOWN`.
    """
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
    """Counts in four characters or so: ``999``, ``12.3k``, ``4.5M``, ``2.1G``."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / min(unit, 1e3 if name == 'k' else unit):.1f}{name}"
    return f"{value:.0f}"


def measure(value: float) -> str:
    """A metric in at most eight characters, with three digits that matter: ``0.412``, ``43.1``, ``1.2e-06``."""
    if value == 0:
        return "0"
    size = abs(value)
    if not 1e-3 <= size < 1e5:
        return f"{value:.1e}"
    return f"{value:.0f}" if size >= 1e3 else f"{value:.3g}"


def size(count: float) -> str:
    """Bytes as ``512 B``, ``2.1 MB``: powers of a thousand, as disks are sold."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def share(part: float, whole: float) -> str:
    """``37%``; :data:`UNKNOWN` of nothing."""
    return f"{100 * part / whole:.0f}%" if whole > 0 else UNKNOWN


def bar(done: float, total: float, width: int) -> str:
    """A bar of ``width`` cells: only a total that is reached fills the last, and what has begun fills the first."""
    if width <= 0:
        return ""
    if total <= 0:
        return _EMPTY * width
    part = min(max(done / total, 0.0), 1.0)
    full = int(part * width)
    if part > 0:
        full = max(full, 1)
    if part < 1:
        full = min(full, max(width - 1, 0))
    return _FULL * full + _EMPTY * (width - full)


def short(text: str, width: int) -> str:
    """``text`` in at most ``width`` cells, harmless to a terminal; what is cut ends in ``…``."""
    clean = printable(text)
    if cell_len(clean) <= width:
        return clean
    return set_cell_size(clean, width - 1).rstrip() + "…" if width > 0 else ""
