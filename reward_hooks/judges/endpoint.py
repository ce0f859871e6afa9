"""Where a judge lives, what it costs and how hard it may be asked; one section of a judge's configuration.

Invariant: a key is named, never written down, and a cap is a number that the client keeps.
"""

from __future__ import annotations

import os
from typing import Any, Self

from pydantic import Field, model_validator

from swarm.errors import ConfigError
from swarm.types import Model


class Endpoint(Model):
    """An OpenAI-compatible server, or for score models the server they are behind. Prices are per million tokens, in
    whatever currency ``max_cost`` is in; caps hold for the life of this process.

    The model in training can be its own judge: name the ``/v1`` of the swarm server, which is the engine without an
    episode. The address of the gateway is the wrong one, since every question to it is a group of its own.
    """

    base_url: str = Field(pattern=r"^https?://", description="ends with /v1 as in the OpenAI SDK")
    model: str = Field(default="", description="sent as the model of each call; empty: not sent")
    api_key_env: str = Field(default="", description="environment variable that holds the key; empty: no key")
    extra_body: dict[str, Any] = Field(default={}, description="further fields of each call, e.g. reasoning_effort")

    timeout_seconds: float = Field(default=60.0, gt=0, description="of one try")
    attempts: int = Field(default=3, ge=1, le=10, description="tries of one call")
    retry_base_seconds: float = Field(default=0.5, gt=0, description="first pause between tries, then doubled")
    retry_cap_seconds: float = Field(default=8.0, gt=0, description="longest pause between tries")
    max_concurrency: int = Field(default=16, ge=1, le=1024, description="calls in flight, over all groups")
    cache_entries: int = Field(default=4096, ge=0, description="answers kept, by content; 0: none")

    input_price: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    output_price: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_cost: float | None = Field(default=None, gt=0, description="money; calls that might pass it are not made")
    max_calls: int | None = Field(default=None, ge=1, description="calls, tries included")

    @model_validator(mode="after")
    def _a_cap_needs_a_price(self) -> Self:
        if self.max_cost is not None and not self.input_price and not self.output_price:
            raise ValueError("max_cost needs input_price and output_price: without them every call is free")
        return self

    def headers(self) -> dict[str, str]:
        """The headers of each call.

        Raises:
            ConfigError: the variable that should hold the key is not set.
        """
        if not self.api_key_env:
            return {}
        key = os.environ.get(self.api_key_env, "")
        if not key:
            raise ConfigError(f"the judge at {self.base_url} needs its key in the environment as {self.api_key_env}")
        return {"authorization": f"Bearer {key}"}
