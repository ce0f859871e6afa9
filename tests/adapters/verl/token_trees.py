"""Random rows of token ids that share prefixes in every way: forks, equal rows, rows that are prefixes of others."""

from __future__ import annotations

from hypothesis import strategies as st

#: so few tokens that rows also meet by chance
VOCABULARY = 4
_token = st.integers(0, VOCABULARY - 1)
#: which of the rows before it a row continues, after how many hundredths of that row, and by what
_growth = st.tuples(st.integers(0, 20), st.integers(0, 100), st.lists(_token, max_size=9))


def _grown(first: list[int], growths: list[tuple[int, int, list[int]]]) -> list[list[int]]:
    rows = [first]
    for base, part, more in growths:
        row = rows[base % len(rows)]
        rows.append((row[: len(row) * part // 100] + more or [0, 0])[:40])
    # a row has a prompt and an answer
    return [row if len(row) > 1 else [*row, 0] for row in rows]


token_rows = st.builds(_grown, st.lists(_token, min_size=2, max_size=12), st.lists(_growth, max_size=7))
