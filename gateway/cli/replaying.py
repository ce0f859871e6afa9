"""What the command ``replay`` needs around the replay: the sender that its flags describe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from gateway.replay.bar import ReplayBar
from gateway.replay.report import Report
from gateway.replay.run import ReplayConfig, replay
from gateway.replay.senders import CommandSender, HttpSender, Sender
from swarm.client import AsyncSwarmClient, RetryPolicy
from swarm.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """Where the prompts go and where the steps are read."""

    base_url: str
    api_key: str
    command: str | None
    model: str
    max_tokens: int | None
    request_timeout: float
    swarm_url: str | None
    swarm_token: str | None


async def run(config: ReplayConfig, target: Target, bar: ReplayBar) -> Report:
    """Replay with the sender that ``target`` describes.

    Raises:
        ConfigError: the address or the command is wrong, or the address does not tell its model.
    """
    url = urlsplit(target.base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"--base-url {target.base_url!r} must look like http://127.0.0.1:8000/v1")
    limits = httpx.Limits(max_connections=config.concurrency + 2)
    async with httpx.AsyncClient(timeout=target.request_timeout, limits=limits, trust_env=False) as http:
        sender: Sender
        model = target.model
        if target.command is not None:
            env = {"OPENAI_BASE_URL": target.base_url, "OPENAI_API_KEY": target.api_key}
            sender = CommandSender(target.command, env, target.request_timeout)
        else:
            model = model or await first_model(http, target.base_url, target.api_key)
            body: dict[str, Any] = {"model": model}
            if target.max_tokens is not None:
                body["max_tokens"] = target.max_tokens
            sender = HttpSender(http, target.base_url, target.api_key, body)
        config = config.model_copy(update={"model": model})
        if target.swarm_url is None:
            return await replay(config, sender, None, bar)
        # the next poll is the retry
        policy = RetryPolicy(attempts=1)
        async with AsyncSwarmClient(target.swarm_url, token=target.swarm_token, policy=policy) as swarm:
            return await replay(config, sender, swarm, bar)


async def first_model(http: httpx.AsyncClient, base_url: str, api_key: str) -> str:
    """The first model that ``{base_url}/models`` lists.

    Raises:
        ConfigError: nobody answers there, or with no model.
    """
    url = f"{base_url.rstrip('/')}/models"
    try:
        answer = await http.get(url, headers={"authorization": f"Bearer {api_key}"}, timeout=10.0)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPError as exc:
        raise ConfigError(f"{url} does not answer ({exc}); check --base-url") from exc
    except (ValueError, LookupError, TypeError) as exc:
        raise ConfigError(f"{url} lists no model; give --model") from exc
