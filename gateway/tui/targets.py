"""Whom the monitor asks: swarm servers and gateways, from the options of the command.

Invariant: every target has an address that can be asked and a secret that can stand in a header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import httpx

from swarm.client.wire import parse_server_url
from swarm.errors import ConfigError

SWARM_URL = "http://127.0.0.1:10086"
GATEWAY_URL = "http://127.0.0.1:8000"


class Kind(StrEnum):
    """What is expected to answer."""

    SWARM = "swarm server"
    GATEWAY = "gateway"

    @property
    def option(self) -> str:
        """The option that names its address."""
        return "--swarm-url" if self is Kind.SWARM else "--gateway-url"


@dataclass(frozen=True)
class Target:
    """One server; ``secret`` is a swarm server's token or a gateway's key, empty where none was given."""

    kind: Kind
    url: httpx.URL
    secret: str = field(default="", repr=False)

    @property
    def status_url(self) -> str:
        """Where it tells of itself."""
        return f"{str(self.url).rstrip('/')}/status"

    @property
    def address(self) -> str:
        """``http://host:port/prefix`` as it is shown: without a user and a password that it may name."""
        return str(self.url.copy_with(userinfo=b"")).rstrip("/")

    @property
    def name(self) -> str:
        """``host:port/prefix``."""
        return self.address.partition("://")[2]


def make_targets(
    swarm_urls: Sequence[str], tokens: Sequence[str], gateway_urls: Sequence[str], api_keys: Sequence[str]
) -> list[Target]:
    """The targets that the options name, each once; without any address those that ``swarm-gateway up`` uses.

    One secret is for all servers of its kind, several are for one each, in the order of the addresses.

    Raises:
        ConfigError: an address that is none, a number of secrets that fits no number of addresses, or a secret with
            characters that no header takes.
    """
    if not swarm_urls and not gateway_urls:
        swarm_urls, gateway_urls = [SWARM_URL], [GATEWAY_URL]
    targets = [
        *_of_kind(Kind.SWARM, swarm_urls, tokens, "--token (or SWARM_TOKEN)"),
        *_of_kind(Kind.GATEWAY, gateway_urls, api_keys, "--api-key (or OPENAI_API_KEY)"),
    ]
    return list({(target.kind, target.address): target for target in targets}.values())


def _of_kind(kind: Kind, urls: Sequence[str], secrets: Sequence[str], option: str) -> list[Target]:
    stripped = [secret.strip() for secret in secrets]
    if len(stripped) > 1 and len(stripped) != len(urls):
        raise ConfigError(
            f"{option} is given {len(stripped)} times for {len(urls)} addresses: give it once for all of them, or once "
            f"for each {kind.option} in their order"
        )
    if any(not (secret.isascii() and secret.isprintable()) for secret in stripped):
        raise ConfigError(f"{option} has characters that no secret of a {kind} has")
    each = stripped * len(urls) if len(stripped) == 1 else stripped or [""] * len(urls)
    return [Target(kind, _parsed(kind, url), secret) for url, secret in zip(urls, each, strict=True)]


def _parsed(kind: Kind, text: str) -> httpx.URL:
    try:
        return httpx.URL(parse_server_url(text))
    except ConfigError as exc:
        example = SWARM_URL if kind is Kind.SWARM else GATEWAY_URL
        raise ConfigError(f"{kind.option} {text!r} is no http address; write it like {example}") from exc
