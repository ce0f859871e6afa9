"""Rows of token ids as a trie that holds every common prefix once; its parts under a token budget, and what they cost.
Pure numpy.

The rows may form any tree: answers to one prompt, forks, rows that are prefixes of others or equal to them, and several
trees side by side. The trie is packed: its tokens lie in depth-first order, so that the tokens below a node follow it.

Costs of the parts, and of verl's rows, are in floating-point operations of one forward pass, with weights by which they
meet what was measured on a CPU (none was measured on a GPU); only their ratio is used. A backward pass costs both ways
about twice that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

#: A part of its own costs as much as computing about this many tokens: calls on small tensors, gradients added up.
PART_TOKENS = 32
#: A multiplication inside attention, of small blocks and with an exponential for each score, beside one of a matrix.
ATTENTION = 2.5
#: Passes over the logits (copies, exponentials, their gradient), as operations on each of them.
LOGITS = 60
#: verl's passes over them, most of which it makes twice.
ROW_LOGITS = 160
#: Operations in whose time one small call of an attention kernel returns.
CALL = 1.5e6
#: Merging a part of a token's attention into the rest, as operations on each of its numbers.
MERGE = 30
#: How the rows of a micro-batch are computed: padded to the longest; as one row, whose attention computes all pairs and
#: masks those of two rows; or as one row without such pairs (flash attention).
Layout = Literal["padded", "masked", "apart"]


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


@dataclass(frozen=True)
class ModelShape:
    """What the cost of a model depends on.

    Attributes:
        parameters: by which every token is multiplied: those of the layers.
        hidden: numbers for each token between layers.
        vocabulary: logits for each token.
        layers: how many.
        attention: numbers for each token in the queries of a layer.
    """

    parameters: int
    hidden: int
    vocabulary: int
    layers: int
    attention: int


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed by one call of the model.

    Attributes:
        rows: their indices in the mini-batch.
        trie: their tokens.
        needed: int64 [N], the packed tokens whose logits are needed, in order.
        index: int64 [M], for each sampled token of each row, the index in ``needed`` of the token before it.
        labels: int64 [M], the sampled tokens.
        targets: int64 [M], where their log-probabilities belong when the rows lie one after another: verl keeps them at
            the token before.
    """

    rows: list[int]
    trie: Trie
    needed: Tokens
    index: Tokens
    labels: Tokens
    targets: Tokens


def pack(rows: Sequence[Tokens], sampled: Sequence[Tokens], members: list[int]) -> MicroBatch:
    """The part of a mini-batch that holds the rows ``members``.

    Args:
        rows: int64, the token ids of every row of the mini-batch.
        sampled: int64, the positions of the tokens of each row that the policy sampled; never the first.
        members: rows of the part.
    """
    trie = build([rows[row] for row in members])
    before: list[Tokens] = []
    labels: list[Tokens] = []
    targets: list[Tokens] = []
    offset = 0
    for row, path in zip(members, trie.rows, strict=True):
        positions = sampled[row]
        before.append(path[positions - 1])
        labels.append(rows[row][positions])
        targets.append(offset + positions - 1)
        offset += len(path)
    needed, index = np.unique(np.concatenate(before), return_inverse=True)
    return MicroBatch(members, trie, needed, index, np.concatenate(labels), np.concatenate(targets))


def part_cost(shape: ModelShape, part: MicroBatch) -> float:
    """Of computing ``part`` as a trie."""
    nodes = np.array(part.trie.nodes)
    own, below = nodes[:, 1] - nodes[:, 0], nodes[:, 2] - nodes[:, 1]
    pairs = float((own * (own + 1) / 2 + own * below).sum())
    merged = float(((own + below) * (nodes[:, 3] >= 0)).sum())
    layer = shape.attention * (4 * ATTENTION * pairs + MERGE * merged) + CALL * len(nodes)
    logits = len(part.needed) * shape.vocabulary * (2 * shape.hidden + LOGITS)
    return 2.0 * shape.parameters * len(part.trie.ids) + shape.layers * layer + logits


def rows_cost(shape: ModelShape, lengths: Sequence[int], micro_batch: int, layout: Layout = "padded") -> float:
    """Of computing rows of ``lengths`` as verl does: ``micro_batch`` at a time, all logits."""
    total = 0.0
    for start in range(0, len(lengths), micro_batch):
        chunk = lengths[start : start + micro_batch]
        tokens = len(chunk) * max(chunk) if layout == "padded" else sum(chunk)
        match layout:
            case "padded":
                pairs = tokens * max(chunk)
            case "masked":
                pairs = tokens**2
            case "apart":
                pairs = sum(length * (length + 1) / 2 for length in chunk)
        layer = shape.attention * 4 * ATTENTION * pairs + CALL
        logits = tokens * shape.vocabulary * (2 * shape.hidden + ROW_LOGITS)
        total += 2.0 * shape.parameters * tokens + shape.layers * layer + logits
    return total
