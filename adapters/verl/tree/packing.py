"""How a mini-batch is computed: its parts as tries, and what they cost beside verl's rows. Pure numpy.

Costs are in floating-point operations of one forward pass, with weights by which they meet what was measured on a CPU
(none was measured on a GPU); only their ratio is used. A backward pass costs both ways about twice that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from adapters.verl.tree.trie import Tokens, Trie, build

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


#: How the rows of a micro-batch are computed: padded to the longest; as one row, whose attention computes all pairs and
#: masks those of two rows; or as one row without such pairs (flash attention).
Layout = Literal["padded", "masked", "apart"]


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
