"""Arithmetic of one training step that needs no trainer: sizes of mini- and micro-batches, metrics for people."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from swarm.measures import NOT_FINITE


def mini_batch_rows(rows: int, mini_batches: int, *, data_parallel: int, micro_batch: int | None) -> int:
    """How many rows each mini-batch has when ``rows`` are trained in at most ``mini_batches`` optimizer steps.

    verl pads the batch to whole mini-batches of one size; the padding is always less than one of them, so none consists
    of padding alone.

    Args:
        rows: of the batch, at least 1.
        mini_batches: optimizer steps that the job asks for; there are fewer where there are too few rows.
        data_parallel: ranks, which train equal numbers of rows.
        micro_batch: the most rows of a rank that are computed together; a rank's share of a mini-batch is rounded up to
            micro-batches of one size, so that a prime number of rows is not computed one by one, unless that would cost
            an optimizer step. ``None`` where verl packs rows by their tokens.
    """
    share = math.ceil(rows / (mini_batches * data_parallel))
    if micro_batch is not None:
        parts = math.ceil(share / micro_batch)
        rounded = math.ceil(share / parts) * parts
        if math.ceil(rows / (rounded * data_parallel)) == math.ceil(rows / (share * data_parallel)):
            share = rounded
    return share * data_parallel


def micro_batch_rows(rows: int, limit: int) -> int:
    """The largest size of micro-batches, at most ``limit`` rows, that divides ``rows``, as verl requires."""
    return next(size for size in range(min(rows, limit), 0, -1) if rows % size == 0)


def spread_groups(groups: Sequence[str], prompts: Sequence[int], answers: Sequence[int], ranks: int) -> list[list[int]]:
    """Which rows each data-parallel rank computes: equally many, the rows of a group on one rank where they fit.

    What a group costs where its shared prefix is computed once is its longest prompt and all its answers. Groups go to
    the rank that has the least to compute so far, the costliest first (Graham's LPT rule, SIAM Journal on Applied
    Mathematics 17, 1969); one that no rank has room for is cut.

    Args:
        groups: of each row; their number is a multiple of ``ranks``.
        prompts: tokens of each row's prompt.
        answers: tokens of each row's answer.
        ranks: how many there are.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)

    def cost(rows: list[int]) -> int:
        return max(prompts[row] for row in rows) + sum(answers[row] for row in rows)

    room, load = [len(groups) // ranks] * ranks, [0] * ranks
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for rows in sorted(members.values(), key=cost, reverse=True):
        while rows:
            fitting = [rank for rank in range(ranks) if room[rank] >= len(rows)]
            rank = min(fitting, key=load.__getitem__) if fitting else max(range(ranks), key=room.__getitem__)
            part, rows = rows[: room[rank]], rows[room[rank] :]
            parts[rank] += part
            room[rank] -= len(part)
            load[rank] += cost(part)
    return parts


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are one finite number, as floats; how many were not finite is a metric of its own."""
    plain: dict[str, float] = {}
    dropped = 0
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        # JSON, in which people read them, has no NaN
        if math.isfinite(number):
            plain[name] = number
        else:
            dropped += 1
    plain[NOT_FINITE] = float(dropped)
    return plain
