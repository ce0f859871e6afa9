"""What hooks spend on calls of models: whoever runs a hook may count it, without knowing what the hook calls."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Spending:
    """Counts since the start; ``calls`` are HTTP requests, retries included; ``cost`` is in the prices' currency."""

    calls: int = 0
    retries: int = 0
    cache_hits: int = 0
    failures: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0


#: The meters of the caller, to which a call adds its counts.
METERS: ContextVar[tuple[Spending, ...]] = ContextVar("meters", default=())


@contextmanager
def metered(meter: Spending | None = None) -> Generator[Spending]:
    """Count what hooks spend inside the block, in its tasks and hook threads too, in ``meter`` or a new one."""
    meter = meter or Spending()
    token = METERS.set((*METERS.get(), meter))
    try:
        yield meter
    finally:
        METERS.reset(token)
