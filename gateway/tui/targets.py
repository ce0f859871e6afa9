"""The servers that the monitor watches, from the options of the command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from gateway.observability.scrubbing import without_credentials
from swarm.errors import ConfigError


class Kind(StrEnum):
    """The kind of a server."""

    SWARM = "swarm server"
    GATEWAY = "gateway"

    @property
    def option(self) -> str:
        """The option with its address."""
        return "--swarm-url" if self is Kind.SWARM else "--gateway-url"

    @property
    def default_url(self) -> str:
        """Where ``swarm-gateway up`` runs it."""
        return "http://127.0.0.1:10086" if self is Kind.SWARM else "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Target:
    """One server; ``secret`` is a swarm server's token or a gateway's key, or empty."""

    kind: Kind
    url: str = field(repr=False)
    secret: str = field(default="", repr=False)

    def url_of(self, path: str) -> str:
        """``path`` below the address."""
        # a user and a password in the address and a secret would be two credentials
        return f"{self.address if self.secret else self.url}{path}"

    @property
    def address(self) -> str:
        """``http://host:port/prefix`` for display: without user and password."""
        return without_credentials(self.url)

    @property
    def name(self) -> str:
        """``host:port/prefix``."""
        return self.address.partition("://")[2]


def make_targets(
    swarm_urls: Sequence[str], tokens: Sequence[str], gateway_urls: Sequence[str], api_keys: Sequence[str]
) -> list[Target]:
    """The servers of the options, each once; without any address those of ``swarm-gateway up``.

    One secret is for all servers of its kind, several are for one each, in the order of the addresses.

    Raises:
        ConfigError: an invalid address, a number of secrets that fits no number of addresses, or a secret with
            characters that no header allows.
    """
    if not swarm_urls and not gateway_urls:
        swarm_urls, gateway_urls = [Kind.SWARM.default_url], [Kind.GATEWAY.default_url]
    targets = [
        *_of_kind(Kind.SWARM, swarm_urls, tokens, "--token (or SWARM_TOKEN)"),
        *_of_kind(Kind.GATEWAY, gateway_urls, api_keys, "--api-key (or SWARM_GATEWAY_KEY)"),
    ]
    return list({(target.kind, target.address): target for target in targets}.values())


def _of_kind(kind: Kind, urls: Sequence[str], secrets: Sequence[str], option: str) -> list[Target]:
    each = [secret.strip() for secret in secrets] or [""]
    if any(not (secret.isascii() and secret.isprintable()) for secret in each):
        raise ConfigError(f"{option} has characters that no secret of a {kind} has")
    if len(each) == 1:
        each *= len(urls)
    if len(each) != len(urls):
        raise ConfigError(
            f"{option} is given {len(each)} times for {len(urls)} addresses: give it once for all of them, or once for "
            f"each {kind.option} in their order"
        )
    return [Target(kind, _parse_url(kind, url), secret) for url, secret in zip(urls, each, strict=True)]


def _parse_url(kind: Kind, text: str) -> str:
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        if url.scheme not in ("http", "https") or not url.hostname or url.port == 0:
            raise ValueError
    except ValueError:
        raise ConfigError(f"{kind.option} {text!r} is no http address; write it like {kind.default_url}") from None
    return url._replace(path=url.path.rstrip("/"), query="", fragment="").geturl()
