"""A configuration made ready to run: its hooks are loaded and its routes spelt out, and nothing is connected yet.

Invariant: whatever can be wrong with a configuration is found here, before anything of it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.config import ONLY_ROUTE, GatewayConfig, RouteConfig, RouteSettings
from reward_hooks import Hooks, load_hooks
from swarm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PlannedRoute:
    """One route before it is connected; ``answers_to_served`` as of :class:`gateway.routing.Route`."""

    name: str
    settings: RouteSettings
    names: tuple[str, ...]
    answers_to_served: bool
    is_default: bool
    hooks: Hooks | None


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration and its routes."""

    config: GatewayConfig
    routes: tuple[PlannedRoute, ...]

    @classmethod
    def of(cls, config: GatewayConfig) -> Plan:
        """The plan of ``config``; loads the hooks, which runs code of theirs.

        Raises:
            ConfigError: hooks do not load, or sessions would end after the groups that they are to credit.
        """
        loaded: dict[str, Hooks] = {}

        def hooks_of(settings: RouteSettings) -> Hooks | None:
            if settings.swarm_url is None or settings.hooks is None:
                return None
            if settings.hooks not in loaded:
                loaded[settings.hooks] = load_hooks(settings.hooks)
            _check_sessions(settings, loaded[settings.hooks])
            return loaded[settings.hooks]

        if not config.routes:
            only = PlannedRoute(
                name=ONLY_ROUTE,
                settings=config,
                names=tuple(config.model_aliases),
                answers_to_served=True,
                # what a plain upstream has is its own to say
                is_default=config.swarm_url is None or config.default_route is not None,
                hooks=hooks_of(config),
            )
            return cls(config, (only,))
        return cls(config, tuple(_planned(route, config, hooks_of(route)) for route in config.routes))


def _planned(route: RouteConfig, config: GatewayConfig, hooks: Hooks | None) -> PlannedRoute:
    is_default = route.name == config.default_route
    aliases = config.model_aliases if is_default else []
    return PlannedRoute(
        name=route.name,
        settings=route,
        names=tuple(dict.fromkeys([*(route.models or [route.name]), *aliases])),
        answers_to_served=not route.models,
        is_default=is_default,
        hooks=hooks,
    )


def _check_sessions(settings: RouteSettings, hooks: Hooks) -> None:
    idle, window = settings.idle_seconds(credits=True), settings.session_window_seconds
    if hooks.session_end is not None and 0 < window <= idle:
        raise ConfigError(
            f"session_idle_seconds ({idle:g}) is not below session_window_seconds ({window:g}): a session that falls "
            f"silent would end after its groups are submitted, and on_session_end of {hooks.source} would credit none; "
            "lower the first or raise the second (0: no group waits for it)"
        )
