"""``Plan``: the routes of a configuration with their hooks loaded, before anything is connected.

Invariant: a mistake in a configuration is found by its plan, before anything of it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from pydantic import SecretStr

from gateway.config.gateway import ONLY_ROUTE, GatewayConfig, RouteConfig, is_pattern
from gateway.config.route import RouteSettings, Share, UpstreamConfig
from gateway.config.takeover import ServeConfig
from gateway.sessions.sessions import idle_seconds
from gateway.takeover.suites import Suite
from reward_hooks import Hooks, load_hooks
from swarm.credentials import digest
from swarm.errors import ConfigError
from swarm.validation import environment_key

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
        suites: on which a challenger must be not worse, in the order of their names.
        upstream_key: the incumbent, or the upstream; ``None``: neither. Routes with the same key share one
            :class:`Upstream`.
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
    upstream_key: UpstreamKey | None

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
        return cls(config, tuple(_planned(route, config, load) for route in config.routes or [None]))


def _planned(route: RouteConfig | None, config: GatewayConfig, load: Callable[[str], Hooks]) -> PlannedRoute:
    """``route``, or the only one of a ``config`` that lists none."""
    settings: RouteSettings = config if route is None else route
    hooks: Hooks | None = None
    if settings.swarm_url is not None and settings.hooks is not None:
        _check_sessions(settings, hooks := load(settings.hooks))
    serve = settings.serve
    upstream = settings.upstream if serve is None else _incumbent(settings, serve)
    gate = serve.gate if serve is not None else None
    suites = gate.suites if gate is not None else {}
    name, models = (ONLY_ROUTE, config.model_aliases) if route is None else (route.name, config.names_of(route))
    # a plain upstream itself knows which models it has, and so does an incumbent
    takes_all = route is None and (config.swarm_url is None or serve is not None)
    return PlannedRoute(
        name=name,
        settings=settings,
        names=tuple(model for model in models if not is_pattern(model)),
        patterns=tuple(model for model in models if is_pattern(model)),
        answers_to_served=serve is None and (route is None or all(map(is_pattern, route.models))),
        is_default=takes_all or name == config.default_route,
        hooks=hooks,
        gate_hooks=load(gate.hook) if gate is not None and gate.hook is not None else None,
        suites=tuple(Suite.read(suite, source) for suite, source in sorted(suites.items())),
        upstream_key=(upstream, settings.sample_timeout_seconds) if upstream is not None else None,
    )


def _incumbent(settings: RouteSettings, serve: ServeConfig) -> UpstreamConfig:
    """The address of a route's incumbent, with its key.

    Raises:
        ConfigError: the key is not in the environment.
    """
    incumbent = serve.incumbent.server
    if serve.incumbent.is_beside:
        # its swarm server answers, with the same token
        base_url = f"{settings.swarm_url or ''}".rstrip("/") + urlsplit(incumbent.base_url).path
        return UpstreamConfig(base_url=base_url, api_key=settings.swarm_token, model=incumbent.model)
    key = environment_key(incumbent.api_key_env, f"the incumbent at {incumbent.base_url}")
    return UpstreamConfig(base_url=incumbent.base_url, api_key=SecretStr(key), model=incumbent.model)


def _check_sessions(settings: RouteSettings, hooks: Hooks) -> None:
    idle, window = idle_seconds(settings, credits=True), settings.session_window_seconds
    if hooks.session_end is not None and 0 < window <= idle:
        raise ConfigError(
            f"session_idle_seconds ({idle:g}) is not below session_window_seconds ({window:g}): a session that falls "
            f"silent would end after its groups are submitted, and on_session_end of {hooks.source} would credit none; "
            "lower the first or raise the second (0: no group waits for it)"
        )
