"""Arithmetic of one training step that needs no trainer: sizes of mini-batches, metrics for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def mini_batch_groups(rows: int, mini_batches: int, *, group_size: int, data_parallel: int) -> int:
    """verl's ``ppo_mini_batch_size`` (in groups of ``group_size`` rows) that trains ``rows`` in ``mini_batches`` steps.

    The rows of a mini-batch are a multiple of ``data_parallel``, as verl requires, and verl pads the batch to whole
    mini-batches; so not every number of optimizer steps can be had. The nearest is chosen, then the least padding. With
    ``u`` smallest mini-batches in a batch, ``mini_batches`` is met where ``u >= mini_batches * (mini_batches - 1)``.
    """
    multiple = data_parallel // math.gcd(data_parallel, group_size)
    units = math.ceil(rows / (multiple * group_size))

    def cost(size: int) -> tuple[int, int]:
        steps = math.ceil(units / size)
        return abs(steps - mini_batches), steps * size

    return multiple * min(range(1, units + 1), key=cost)


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
    plain["swarm/non_finite_metrics"] = float(dropped)
    return plain
