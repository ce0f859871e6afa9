"""``GatewayConfig``: one validated YAML file says all of what the gateway does.

Invariant: a gateway that others can reach has API keys; a misspelt key is an error that names it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, SecretStr, ValidationError, model_validator

from swarm.errors import ConfigError
from swarm.job import describe_validation
from swarm.types import Model

#: Marks an API key that is given as its SHA-256 digest.
DIGEST_PREFIX = "sha256:"
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


class FallbackConfig(Model):
    """An OpenAI-compatible upstream that answers, untrained, when the swarm cannot."""

    base_url: str = Field(pattern=r"^https?://", description="ends with /v1 as in the OpenAI SDK")
    api_key: SecretStr = SecretStr("")
    model: str | None = Field(default=None, description="model name sent there; default: the one asked for")


class GatewayConfig(Model):
    """One gateway. Times are seconds, sizes bytes.

    The defaults of ``host`` and ``api_keys`` go together: without keys only this machine can connect.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_keys: list[SecretStr] = Field(
        default=[], description="keys applications may use, in clear or as 'sha256:<hex digest>'; empty: no key needed"
    )

    model_aliases: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[], description="further names of the swarm's model, such as the one an application already asks for"
    )

    swarm_url: str = Field(default="http://127.0.0.1:10086", pattern=r"^https?://")
    swarm_token: SecretStr = SecretStr("")
    hooks: str = Field(min_length=1, description="folder of hook files, blend (.yaml), 'module:attribute', or name")
    num_repeat: int | None = Field(
        default=None,
        ge=1,
        description="episodes per request; default: the job's; groups of another size are not trained",
    )
    control: Literal["none", "shuffle"] = Field(
        default="none", description="shuffle: submit each group's rewards permuted, a control run that must not learn"
    )

    claim_wait_seconds: float = Field(default=120.0, gt=0, description="longest wait for episodes, e.g. while syncing")
    offline_wait_seconds: float = Field(
        default=10.0, ge=0, description="longest wait while the swarm server is down or its engine OFFLINE"
    )
    sample_timeout_seconds: float = Field(default=300.0, gt=0, description="deadline of all samples of a request")
    hook_timeout_seconds: float = Field(default=60.0, gt=0, description="deadline of each hook call")
    submit_timeout_seconds: float = Field(
        default=60.0, gt=0, description="how long the rewards of a group are offered again before they are given up"
    )
    keepalive_seconds: float = Field(default=3.0, gt=0, le=60, description="longest silence of a stream")
    max_in_flight: int = Field(default=256, ge=1, description="requests at once; more are answered 429")
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    fallback: FallbackConfig | None = None

    @model_validator(mode="after")
    def _reachable_needs_keys(self) -> Self:
        if self.host not in LOOPBACK_HOSTS and not self.api_keys:
            raise ValueError(f"host {self.host!r} is reachable from other machines: set api_keys, or use 127.0.0.1")
        keys = [key.get_secret_value() for key in self.api_keys]
        if not all(keys):
            raise ValueError("api_keys must not hold an empty key")
        digests = [key.removeprefix(DIGEST_PREFIX) for key in keys if key.startswith(DIGEST_PREFIX)]
        if not all(_SHA256.fullmatch(digest) for digest in digests):
            raise ValueError(f"a key of api_keys that begins with '{DIGEST_PREFIX}' goes on with 64 hexadecimal digits")
        return self


def parse_config(text: str, where: str = "gateway config", folder: Path | None = None) -> GatewayConfig:
    """Read a ``GatewayConfig`` from YAML text.

    Args:
        text: a mapping of the fields; ``swarm_token`` defaults to the environment's ``SWARM_TOKEN``.
        where: what to call the text in errors.
        folder: what a relative hooks folder is relative to; default: the working directory.

    Raises:
        ConfigError: no mapping, a misspelt key, a value out of range; names each.
    """
    try:
        data: Any = yaml.safe_load(text) or {}
    except yaml.YAMLError as exc:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must be a mapping of gateway settings, got {type(data).__name__}")
    if "SWARM_TOKEN" in os.environ:
        data.setdefault("swarm_token", os.environ["SWARM_TOKEN"])
    hooks = data.get("hooks")
    if folder is not None and isinstance(hooks, str) and (folder / hooks).exists():
        data["hooks"] = str((folder / hooks).resolve())
    try:
        return GatewayConfig.model_validate(data)
    except ValidationError as exc:
        raise describe_validation(exc, where, GatewayConfig) from exc


def load_config(path: Path) -> GatewayConfig:
    """Read a ``GatewayConfig`` from the YAML file at ``path``; a relative hooks folder is looked up beside it.

    Raises:
        ConfigError: the file is missing or unreadable, or see :func:`parse_config`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the gateway config {path}: {exc}") from exc
    return parse_config(text, where=str(path), folder=path.parent)
