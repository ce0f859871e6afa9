"""What judges cost: budgets that hold before the money is spent, and meters that read what was.

Invariant: what is spent plus what calls in flight may still cost never passes a cap. What a call cost is the usage that
its answer states; where that is unknown (no usage, a timeout, a disconnect) it is the most it can have cost.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any, cast

from reward_hooks.judges.endpoint import Endpoint
from swarm.errors import HookError

_MILLION = 1_000_000


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

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


_METERS: ContextVar[tuple[Spending, ...]] = ContextVar("judge_meters", default=())


@contextmanager
def metered() -> Generator[Spending]:
    """Counts what every judge spends inside the block, whichever client it uses; tasks and hook threads included."""
    meter = Spending()
    token = _METERS.set((*_METERS.get(), meter))
    try:
        yield meter
    finally:
        _METERS.reset(token)


class Budget:
    """The caps of one endpoint and what of them is gone."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._reserved = 0.0
        self.spent = Spending()

    def count(self, name: str, amount: float = 1) -> None:
        """Add to one count, here and in the meters of the caller."""
        for one in (self.spent, *_METERS.get()):
            setattr(one, name, getattr(one, name) + amount)

    def reserve(self, body_bytes: int, output_tokens: int) -> float:
        """Set aside the most that one call can cost, and count it as made.

        A token is at least one byte, so the body's size bounds the prompt.

        Raises:
            HookError: a cap would be passed (``judge_budget``).
        """
        endpoint = self._endpoint
        if endpoint.max_calls is not None and self.spent.calls >= endpoint.max_calls:
            raise self._over(f"all {endpoint.max_calls} calls of max_calls are made")
        most = self._price(body_bytes, output_tokens)
        if endpoint.max_cost is not None and self.spent.cost + self._reserved + most > endpoint.max_cost:
            raise self._over(
                f"{self.spent.cost:.6g} of max_cost {endpoint.max_cost:g} is spent, {self._reserved:.6g} may be spent "
                f"by calls in flight, and one more may cost {most:.6g}"
            )
        self._reserved += most
        self.count("calls")
        return most

    def settle(self, reserved: float, usage: object) -> None:
        """Replace a reservation by what the call cost: its ``usage`` object, or all of it where there is none."""
        self._reserved = max(0.0, self._reserved - reserved)
        tokens = _tokens(usage)
        if tokens is None:
            self.count("cost", reserved)
            return
        self.count("input_tokens", tokens[0])
        self.count("output_tokens", tokens[1])
        self.count("cost", self._price(*tokens))

    def release(self, reserved: float) -> None:
        """Give a reservation back: the server did not work on the call."""
        self._reserved = max(0.0, self._reserved - reserved)

    def _price(self, input_tokens: int, output_tokens: int) -> float:
        endpoint = self._endpoint
        return (input_tokens * endpoint.input_price + output_tokens * endpoint.output_price) / _MILLION

    def _over(self, why: str) -> HookError:
        return HookError(f"the judge at {self._endpoint.base_url} is over its budget: {why}", code="judge_budget")


def _tokens(usage: object) -> tuple[int, int] | None:
    if not isinstance(usage, dict):
        return None
    fields = cast("dict[str, Any]", usage)
    read, written = fields.get("prompt_tokens"), fields.get("completion_tokens") or 0
    return (read, written) if isinstance(read, int) and isinstance(written, int) else None
