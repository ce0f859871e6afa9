"""``python -m swarm.server.journal.scrub JOURNAL``: clears what SQLite leaves in the free middle of its pages.

Where rows move to another page, SQLite leaves copies of them in the gap between a page's pointers and its cells, also
with ``secure_delete``: bytes that it never reads, and writes again with the page. Invariant: only gaps are changed, of
pages that the file's own pointer map calls b-tree pages (https://www.sqlite.org/fileformat.html). Nobody writes the
file meanwhile, and its log is empty. It is a process of its own, since closing a file frees a process's locks on it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: entries of the pointer map for b-tree pages: a root, and any other
_BTREES = (1, 5)
_PAGES = 1024


def scrub(path: Path) -> int:
    """Clear the gaps of a database with ``auto_vacuum``; how many had something in them."""
    if not path.stat().st_size:
        return 0
    file: NDArray[Any] = np.memmap(path, dtype=np.uint8, mode="r+")
    size = _big_endian(file[16:18]) or 1
    size = 65536 if size == 1 else size
    pages = file.reshape(-1, size)
    kinds = _kinds(pages, size - int(file[20]))
    columns = np.arange(size)
    cleared = 0
    for first in range(0, len(pages), _PAGES):
        numbers = first + np.flatnonzero(np.isin(kinds[first : first + _PAGES], _BTREES))
        block = np.asarray(pages[numbers])
        leaf = block[:, 0] >= 10
        begin = np.where(leaf, 8, 12) + 2 * _big_endian(block[:, 3:5])
        end = _big_endian(block[:, 5:7])
        end[end == 0] = 65536
        rest = (block != 0) & (columns >= begin[:, None]) & (columns < end[:, None])
        for row in np.flatnonzero(rest.any(axis=1)):
            pages[numbers[row], begin[row] : end[row]] = 0
            cleared += 1
    getattr(file, "flush")()  # noqa: B009 - of numpy.memmap
    return cleared


def _kinds(pages: NDArray[Any], usable: int) -> NDArray[Any]:
    """The pointer map's type of each page; 0 for its own pages and the first."""
    kinds = np.zeros(len(pages), np.uint8)
    entries = usable // 5
    for at in range(1, len(pages), entries + 1):
        count = min(entries, len(pages) - at - 1)
        kinds[at + 1 : at + 1 + count] = pages[at, : 5 * count : 5]
    return kinds


def _big_endian(two: NDArray[Any]) -> Any:
    return two[..., 0].astype(np.int64) * 256 + two[..., 1]


if __name__ == "__main__":
    scrub(Path(sys.argv[1]))
