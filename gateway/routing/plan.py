"""``Plan``: the routes of a configuration with their hooks loaded, before anything is connected.

Invariant: a mistake in a configuration is found by its plan, before anything of it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from gateway.config.gateway import ONLY_ROUTE, GatewayConfig, RouteConfig, is_pattern
from gateway.config.route import RouteSettings, Share, UpstreamConfig
from gateway.config.takeover import ServeConfig
from gateway.takeover.suites import Suite
from reward_hooks import Hooks, load_hooks
from swarm.credentials import digest
from swarm.errors import ConfigError

#: Address, token, name as a client of its own (empty: none), and share.
SwarmKey = tuple[str, str, str, Share | None]
UpstreamKey = tuple[UpstreamConfig, float]


@dataclass(frozen=True, eq=False)
class PlannedRoute:
    """Where the requests for some model names go, before it is connected.

    Attributes:
        name: in keys, metrics and logs.
        settings: how it answers.
        names: that applications may ask for, apart from the model that the swarm serves.
        patterns: of further names.
        answers_to_served: whether the name of the swarm's model leads here too.
        is_default: whether it takes what names no model or an unknown one.
        hooks: that judge; ``None``: a plain upstream answers everything.
        gate_hooks: that judge for the verdict; ``None``: those that train.
        suites: on which a challenger must be not worse.
    """

    name: str
    settings: RouteSettings
    names: tuple[str, ...]
    patterns: tuple[str, ...]
    answers_to_served: bool
    is_default: bool
    hooks: Hooks | None
    gate_hooks: Hooks | None
    suites: tuple[Suite, ...]

    @property
    def swarm_keys(self) -> dict[str, SwarmKey]:
        """By the label of the callers that have a share of their own, and for all others (empty). Routes with the same
        key share one :class:`Swarm`."""
        settings = self.settings
        if settings.swarm_url is None:
            return {}
        token = settings.swarm_token.get_secret_value()
        server = settings.swarm_url.rstrip("/"), token
        # a name is one app's, over all gateways; at the swarm server it belongs to the token that used it first
        name = f"share-{self.name}" + (f"-{digest(token).hex()[:8]}" if token else "")
        shares: dict[str, SwarmKey] = {"": (*server, "" if settings.share is None else name, settings.share)}
        for label, share in settings.key_shares.items():
            shares[label] = (*server, f"{name}/{label}", share)
        return shares

    @property
    def upstream_key(self) -> UpstreamKey | None:
        """Routes with the same key share one :class:`Upstream`."""
        settings = self.settings
        if settings.serve is not None:
            return upstream_of(settings, settings.serve), settings.sample_timeout_seconds
        return (settings.upstream, settings.sample_timeout_seconds) if settings.upstream is not None else None


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration, its hooks loaded, with nothing connected yet."""

    config: GatewayConfig
    routes: tuple[PlannedRoute, ...]

    @classmethod
    def of(cls, config: GatewayConfig) -> Plan:
        """The plan of ``config``; loading its hooks runs their code.

        Raises:
            ConfigError: hooks do not load, a suite cannot be read, or sessions would end after the groups that they are
                to credit.
        """
        load = cache(load_hooks)

        def parts_of(settings: RouteSettings) -> tuple[Hooks | None, Hooks | None, tuple[Suite, ...]]:
            hooks: Hooks | None = None
            if settings.serve is not None:
                # a key that is missing is a mistake of the configuration
                upstream_of(settings, settings.serve)
            if settings.swarm_url is not None and settings.hooks is not None:
                _check_sessions(settings, hooks := load(settings.hooks))
            gate_hooks = load(settings.gate_hook) if settings.gate_hook is not None else None
            return hooks, gate_hooks, suites_of(settings)

        if not config.routes:
            # a plain upstream itself knows which models it has, and so does an incumbent
            plain = config.swarm_url is None or config.serve is not None
            is_default = plain or config.default_route is not None
            names, patterns = _split(config.model_aliases)
            answers_to_served = config.serve is None
            parts = parts_of(config)
            only = PlannedRoute(ONLY_ROUTE, config, names, patterns, answers_to_served, is_default, *parts)
            return cls(config, (only,))
        return cls(config, tuple(_planned(route, config, parts_of(route)) for route in config.routes))


def _planned(
    route: RouteConfig, config: GatewayConfig, parts: tuple[Hooks | None, Hooks | None, tuple[Suite, ...]]
) -> PlannedRoute:
    is_default = route.name == config.default_route
    names, patterns = _split(config.names_of(route))
    answers_to_served = all(map(is_pattern, route.models)) and route.serve is None
    return PlannedRoute(route.name, route, names, patterns, answers_to_served, is_default, *parts)


def suites_of(settings: RouteSettings) -> tuple[Suite, ...]:
    """The suites of a route, in the order of their names.

    Raises:
        ConfigError: one cannot be read.
    """
    suites = settings.serve.gate.suites if settings.serve is not None else {}
    return tuple(Suite.read(name, source) for name, source in sorted(suites.items()))


def upstream_of(settings: RouteSettings, serve: ServeConfig) -> UpstreamConfig:
    """The address of a route's incumbent, with its key.

    Raises:
        ConfigError: the key is not in the environment.
    """
    incumbent = serve.incumbent.server
    if serve.incumbent.is_beside:
        # its swarm server answers, with the same token
        base_url = f"{settings.swarm_url or ''}".rstrip("/") + urlsplit(incumbent.base_url).path
        return UpstreamConfig(base_url=base_url, api_key=settings.swarm_token, model=incumbent.model)
    return UpstreamConfig(base_url=incumbent.base_url, api_key=incumbent.key(), model=incumbent.model)


def _split(models: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names and the patterns among ``models``."""
    return tuple(name for name in models if not is_pattern(name)), tuple(name for name in models if is_pattern(name))


def _check_sessions(settings: RouteSettings, hooks: Hooks) -> None:
    idle, window = settings.idle_seconds(credits=True), settings.session_window_seconds
    if hooks.session_end is not None and 0 < window <= idle:
        raise ConfigError(
            f"session_idle_seconds ({idle:g}) is not below session_window_seconds ({window:g}): a session that falls "
            f"silent would end after its groups are submitted, and on_session_end of {hooks.source} would credit none; "
            "lower the first or raise the second (0: no group waits for it)"
        )
