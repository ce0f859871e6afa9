"""``ServeConfig``: a route whose users an incumbent answers while a challenger learns behind it.

Invariant: a stage or an incumbent that is not built is refused with a sentence. The file names the environment variable
of a key, and never holds the key.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import ConfigDict, Field, SecretStr, field_validator

from swarm.errors import ConfigError
from swarm.evidence.pairs import GateRules
from swarm.types import Model

#: Stages of the design that no gateway has yet.
_NOT_BUILT = ("canary", "live")


class IncumbentUpstream(Model):
    """An OpenAI-compatible server that answers the users."""

    base_url: str = Field(pattern=r"^https?://", description="ends with /v1 as in the OpenAI SDK")
    api_key_env: str = Field(default="", description="environment variable that holds its key; empty: no key")
    model: str | None = Field(default=None, description="model name sent there; default: the one asked for")

    def key(self) -> SecretStr:
        """Its key.

        Raises:
            ConfigError: the environment has none.
        """
        if not self.api_key_env:
            return SecretStr("")
        if not (key := os.environ.get(self.api_key_env, "")):
            raise ConfigError(
                f"the incumbent at {self.base_url} needs its key in the environment as {self.api_key_env}"
            )
        return SecretStr(key)


class Incumbent(Model):
    """Who answers the users."""

    upstream: IncumbentUpstream = Field(description="another server, such as a vendor's API")


class GateConfig(GateRules):
    """How challenger and incumbent are compared: the rules of the gate."""

    model_config = ConfigDict(extra="forbid")


class ServeConfig(Model):
    """An incumbent answers the route's users, and a challenger learns from their requests."""

    incumbent: Incumbent = Field(description="who answers")
    stage: Literal["shadow"] = Field(
        default="shadow", description="shadow: the incumbent answers everybody, the challenger nobody"
    )
    shadow_fraction: float = Field(
        default=1.0, ge=0, le=1, description="share of requests whose group the challenger answers behind the user"
    )
    max_shadows: int = Field(
        default=4, ge=1, description="such groups at once; requests beyond are answered and not compared"
    )
    gate: GateConfig = Field(default=GateConfig(), description="how both are compared")

    @field_validator("stage", mode="before")
    @classmethod
    def _is_built(cls, stage: Any) -> Any:
        if stage in _NOT_BUILT:
            raise ValueError(f"the stage {stage!r} is not built yet: this version has 'shadow' only")
        return stage

    @field_validator("incumbent", mode="before")
    @classmethod
    def _is_an_upstream(cls, incumbent: Any) -> Any:
        if isinstance(incumbent, dict) and "policy" in incumbent:
            raise ValueError("an incumbent that is a kept policy is not built yet: name an upstream")
        return incumbent
