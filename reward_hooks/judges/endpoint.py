"""A judge's endpoint: its address, limits and prices, and the cost of its calls.

Invariant: the money spent plus the most that calls in flight can cost never exceeds a cap. A call costs the usage that
its answer states; if that is unknown (no usage, a timeout, a disconnect), the most that it can have cost. The
configuration names the environment variable of the key, never the key itself.
"""

from __future__ import annotations

from functools import cache
from threading import RLock
from typing import Any, Self, cast

from pydantic import Field, model_validator

from reward_hooks.spending import METERS, Spending
from swarm.errors import HookError
from swarm.types import Model
from swarm.validation import BaseUrl


class Endpoint(Model):
    """An OpenAI-compatible server, or the server of a score model. Prices are per million tokens, in the currency of
    ``max_cost``; caps hold for the life of this process, over all judges with these settings.

    The model in training can be its own judge: use the ``/v1`` of the swarm server, which samples without an episode.
    Do not use the gateway's address: every question to it would start a group of its own.
    """

    base_url: BaseUrl = Field(description="ends with /v1 as in the OpenAI SDK")
    model: str = Field(default="", description="sent as the model of each call; empty: not sent")
    api_key_env: str = Field(default="", description="environment variable that holds the key; empty: no key")
    extra_body: dict[str, Any] = Field(default={}, description="further fields of each call, e.g. reasoning_effort")

    timeout_seconds: float = Field(default=60.0, gt=0, description="of one try")
    attempts: int = Field(default=3, ge=1, le=10, description="tries of one call")
    retry_base_seconds: float = Field(default=0.5, gt=0, description="first pause between tries, then doubled")
    retry_cap_seconds: float = Field(default=8.0, gt=0, description="longest pause between tries")
    max_concurrency: int = Field(
        default=16, ge=1, le=1024, description="calls in flight, over all groups of an event loop"
    )
    cache_entries: int = Field(default=4096, ge=0, description="answers kept, by content; 0: none")

    input_price: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    output_price: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_cost: float | None = Field(default=None, gt=0, description="money; a call that might exceed it is not made")
    max_calls: int | None = Field(default=None, ge=1, description="calls, tries included")

    @model_validator(mode="after")
    def _a_cap_needs_a_price(self) -> Self:
        if self.max_cost is not None and not self.input_price and not self.output_price:
            raise ValueError("max_cost needs input_price and output_price: without them every call is free")
        return self


def budget_of(endpoint: Endpoint) -> Budget:
    """What ``endpoint`` may spend: one with caps has one budget in this process, however often hooks are loaded."""
    capped = endpoint.max_cost is not None or endpoint.max_calls is not None
    return _capped(endpoint.model_dump_json()) if capped else Budget(endpoint)


@cache
def _capped(settings: str) -> Budget:
    return Budget(Endpoint.model_validate_json(settings))


class Budget:
    """The caps of one endpoint and what it has spent; hooks in several threads may share it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._reserved = 0.0
        self._lock = RLock()
        self.spent = Spending()

    def count(self, name: str, amount: float = 1) -> None:
        """Add to one count, here and in the meters of the caller."""
        with self._lock:
            for budget in (self.spent, *METERS.get()):
                setattr(budget, name, getattr(budget, name) + amount)

    def reserve(self, body_bytes: int, output_tokens: int) -> float:
        """Reserve the most that one call can cost, and count the call. A token has at least one byte, so the size of
        the body bounds the prompt.

        Raises:
            HookError: the call might exceed a cap (``judge_budget``).
        """
        endpoint = self._endpoint
        most = self._price(body_bytes, output_tokens)
        with self._lock:
            if endpoint.max_calls is not None and self.spent.calls >= endpoint.max_calls:
                raise self._over(f"all {endpoint.max_calls} calls of max_calls are made")
            if endpoint.max_cost is not None and self.spent.cost + self._reserved + most > endpoint.max_cost:
                raise self._over(
                    f"{self.spent.cost:.6g} of max_cost {endpoint.max_cost:g} is spent, {self._reserved:.6g} may be "
                    f"spent by calls in flight, and one more may cost {most:.6g}"
                )
            self._reserved += most
            self.count("calls")
        return most

    def settle(self, reserved: float, usage: object, *, worked: bool) -> None:
        """Replace a reservation by the cost of the call: nothing unless the server ``worked`` on it, else the tokens of
        its ``usage`` object, or the whole reservation if there is none."""
        with self._lock:
            self._reserved = max(0.0, self._reserved - reserved)
            if not worked:
                return
            match usage:
                case {"prompt_tokens": int() as read, **rest} if isinstance(rest.get("completion_tokens") or 0, int):
                    written = cast("int", rest.get("completion_tokens") or 0)
                    self.count("input_tokens", read)
                    self.count("output_tokens", written)
                    self.count("cost", self._price(read, written))
                case _:
                    self.count("cost", reserved)

    def _price(self, input_tokens: int, output_tokens: int) -> float:
        endpoint = self._endpoint
        return (input_tokens * endpoint.input_price + output_tokens * endpoint.output_price) / 1e6

    def _over(self, why: str) -> HookError:
        return HookError(f"the judge at {self._endpoint.base_url} is over its budget: {why}", code="judge_budget")
