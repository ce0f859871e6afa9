"""Rows of token ids as a trie that holds every common prefix once; splits under a token budget. Pure numpy.

The rows may form any tree: answers to one prompt, forks, rows that are prefixes of others or equal to them, and several
trees side by side. The trie is packed: its tokens lie in depth-first order, so that the tokens below a node follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

#: A part of its own costs as much as computing about this many tokens: calls on small tensors, gradients added up.
PART_TOKENS = 32


class Node(NamedTuple):
    """Packed tokens ``[start, stop)`` that the same rows share; tokens ``[stop, end)`` continue them.

    ``parent`` is the index of the node before it in its rows, -1 where it begins them.
    """

    start: int
    stop: int
    end: int
    parent: int


@dataclass(frozen=True)
class Trie:
    """Packed rows.

    Attributes:
        ids: int64 [T], the tokens.
        positions: int64 [T], the position of each token in its rows.
        nodes: in packed order, so parents come before their children.
        rows: for each row, int64 [its length], the packed index of each of its tokens.
    """

    ids: Tokens
    positions: Tokens
    nodes: list[Node]
    rows: list[Tokens]


@dataclass(frozen=True)
class Ordered:
    """Rows in the order in which rows with a common prefix lie side by side.

    Attributes:
        order: indices of the rows.
        lengths: tokens of row ``order[i]``.
        shared: tokens that row ``order[i]`` has in common with row ``order[i - 1]``; 0 for the first.
    """

    order: list[int]
    lengths: list[int]
    shared: list[int]


def ordered(rows: Sequence[Tokens]) -> Ordered:
    """Order rows by their tokens, prefixes first; equal rows keep their order."""
    # the bytes of big-endian numbers compare like the numbers
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">u4").tobytes())
    shared = [0] * len(rows)
    for index in range(1, len(order)):
        before, row = rows[order[index - 1]], rows[order[index]]
        length = min(len(before), len(row))
        differs = before[:length] != row[:length]
        shared[index] = int(differs.argmax()) if differs.any() else length
    return Ordered(order, [len(rows[row]) for row in order], shared)


def split(rows: Ordered, budget: int, at_least: int = 1) -> list[list[int]]:
    """Divide rows into parts of at most ``budget`` unique tokens each; a row that is longer is a part of its own.

    A cut costs the tokens that the rows on both of its sides share, because both parts compute them. The total cost of
    the parts is the least possible, so cuts lie between subtrees, and as high in the tree as the budget allows.

    Args:
        rows: of one mini-batch.
        budget: tokens.
        at_least: how many parts to make, at most one for each row: data-parallel ranks need equal numbers.

    Returns:
        The rows of each part, in the order of ``rows``.
    """
    count = len(rows.order)
    least = [0.0] + [float("inf")] * count
    begins = [0] * (count + 1)
    for begin in range(count):
        tokens = rows.lengths[begin]
        for end in range(begin + 1, count + 1):
            if end > begin + 1:
                tokens += rows.lengths[end - 1] - rows.shared[end - 1]
                if tokens > budget:
                    break
            cost = least[begin] + rows.shared[begin] + PART_TOKENS
            if cost < least[end]:
                least[end], begins[end] = cost, begin
    cuts = {0}
    end = count
    while end:
        end = begins[end]
        cuts.add(end)
    cheapest = sorted(set(range(count)) - cuts, key=lambda index: (rows.shared[index], index))
    cuts.update(cheapest[: max(0, at_least - len(cuts))])
    return [rows.order[begin:end] for begin, end in pairwise([*sorted(cuts), count])]


def build(rows: Sequence[Tokens]) -> Trie:
    """Pack rows, none of them empty, into a trie."""
    layout = ordered(rows)
    paths: list[Tokens] = [np.empty(0, np.int64)] * len(rows)
    ids: list[Tokens] = []
    positions: list[Tokens] = []
    starts: list[int] = []
    packed = 0
    before = paths[0]
    for row, length, shared in zip(layout.order, layout.lengths, layout.shared, strict=True):
        starts.append(packed)
        before = np.concatenate([before[:shared], np.arange(packed, packed + length - shared)])
        paths[row] = before
        ids.append(rows[row][shared:])
        positions.append(np.arange(shared, length))
        packed += length - shared
    return Trie(np.concatenate(ids), np.concatenate(positions), _nodes(layout, starts, packed), paths)


def _nodes(rows: Ordered, starts: list[int], total: int) -> list[Node]:
    """Nodes of packed rows, whose own tokens begin at ``starts``."""
    spans: list[tuple[int, int, int]] = []
    # rows further on that leave the path of the current one: (tokens in common, packed index), the nearest last
    leaving = [(-1, total)]
    for index in range(len(starts) - 1, -1, -1):
        shared, start = rows.shared[index], starts[index]
        stop = rows.lengths[index]
        while stop > shared:
            common, end = leaving[-1]
            begin = max(common, shared)
            if begin < stop:
                spans.append((start + begin - shared, start + stop - shared, end))
            stop = min(stop, begin)
            if common >= shared:
                leaving.pop()
        while leaving[-1][0] >= shared:
            leaving.pop()
        leaving.append((shared, start))
    nodes: list[Node] = []
    path: list[int] = []
    for start, stop, end in reversed(spans):
        while path and nodes[path[-1]].end <= start:
            path.pop()
        nodes.append(Node(start, stop, end, path[-1] if path else -1))
        path.append(len(nodes) - 1)
    return nodes
