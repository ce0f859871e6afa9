"""From a configuration to running routes, and their exchange for those of a new configuration.

Invariant: a mistake in a configuration is found by its :class:`Plan`, before anything of it runs. A request ends on the
table it began with; connections that only old tables use are closed after their last request and its background work,
and connections that a new table goes on using are never interrupted.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from gateway.background import Background
from gateway.config.gateway import ONLY_ROUTE, GatewayConfig, RouteConfig
from gateway.config.route import RouteSettings, UpstreamConfig
from gateway.rollout.swarm import Swarm, Training
from gateway.routing.table import Route, RouteTable
from gateway.routing.upstream import Upstream
from gateway.stats import Stats
from reward_hooks import HookRunner, Hooks, load_hooks
from swarm.errors import ConfigError

#: Grace of the work that closes old connections, at shutdown.
_LAST_SECONDS = 15.0

_SwarmKey = tuple[str, str]
_UpstreamKey = tuple[UpstreamConfig, float]


@dataclass(frozen=True, slots=True)
class PlannedRoute:
    """One route before it is connected; ``answers_to_served`` as of :class:`gateway.routing.table.Route`."""

    name: str
    settings: RouteSettings
    names: tuple[str, ...]
    answers_to_served: bool
    is_default: bool
    hooks: Hooks | None

    @property
    def swarm_key(self) -> _SwarmKey | None:
        """Routes with the same key share one :class:`Swarm`."""
        settings = self.settings
        if settings.swarm_url is None:
            return None
        return settings.swarm_url.rstrip("/"), settings.swarm_token.get_secret_value()

    @property
    def upstream_key(self) -> _UpstreamKey | None:
        """Routes with the same key share one :class:`Upstream`."""
        settings = self.settings
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
            # a plain upstream itself knows which models it has
            is_default = config.swarm_url is None or config.default_route is not None
            aliases = tuple(config.model_aliases)
            return cls(config, (PlannedRoute(ONLY_ROUTE, config, aliases, True, is_default, hooks_of(config)),))
        return cls(config, tuple(_planned(route, config, hooks_of(route)) for route in config.routes))


def _planned(route: RouteConfig, config: GatewayConfig, hooks: Hooks | None) -> PlannedRoute:
    is_default = route.name == config.default_route
    aliases = config.model_aliases if is_default else []
    names = tuple(dict.fromkeys([*(route.models or [route.name]), *aliases]))
    return PlannedRoute(route.name, route, names, not route.models, is_default, hooks)


def _check_sessions(settings: RouteSettings, hooks: Hooks) -> None:
    idle, window = settings.idle_seconds(credits=True), settings.session_window_seconds
    if hooks.session_end is not None and 0 < window <= idle:
        raise ConfigError(
            f"session_idle_seconds ({idle:g}) is not below session_window_seconds ({window:g}): a session that falls "
            f"silent would end after its groups are submitted, and on_session_end of {hooks.source} would credit none; "
            "lower the first or raise the second (0: no group waits for it)"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Generation:
    """One plan and its table."""

    plan: Plan
    table: RouteTable


class LiveRoutes:
    """Holds the current table; an async context that closes everything.

    Args:
        plan: what to run first.

    Attributes:
        stats: of each route by its name, removed ones included.
    """

    def __init__(self, plan: Plan) -> None:
        self._first = plan
        self._background = Background(grace_seconds=_LAST_SECONDS)
        self._swarms: dict[_SwarmKey, Swarm] = {}
        self._upstreams: dict[_UpstreamKey, Upstream] = {}
        self.stats: dict[str, Stats] = {}
        self._now: _Generation | None = None
        self._older: list[_Generation] = []
        self._changing = asyncio.Lock()

    @property
    def plan(self) -> Plan:
        """The current one."""
        return self._current.plan

    @property
    def table(self) -> RouteTable:
        """The current routes; hold the table (:meth:`RouteTable.held`) to go on using them."""
        return self._current.table

    @property
    def swarms(self) -> list[Swarm]:
        """Of the current routes, and of older ones while they are used."""
        return list(self._swarms.values())

    async def change(self, plan: Plan) -> None:
        """Route new requests by ``plan``; old connections are closed in the background."""
        async with self._changing:
            old = self._current
            self._now = await self._connected(plan)
            self._older.append(old)
            self._background.start(self._retire(old), "closing the connections of an old configuration")

    @property
    def _current(self) -> _Generation:
        assert self._now is not None, "used outside of its context"
        return self._now

    async def _connected(self, plan: Plan) -> _Generation:
        routes = [await self._route(planned) for planned in plan.routes]
        default = next((route for route, planned in zip(routes, plan.routes, strict=True) if planned.is_default), None)
        return _Generation(plan, RouteTable(routes, default))

    async def _route(self, planned: PlannedRoute) -> Route:
        settings, stats = planned.settings, self.stats.setdefault(planned.name, Stats())
        training: Training | None = None
        if (swarm_key := planned.swarm_key) is not None and planned.hooks is not None:
            if (swarm := self._swarms.get(swarm_key)) is None:
                swarm = self._swarms[swarm_key] = await Swarm(*swarm_key).__aenter__()
            hooks = HookRunner(planned.hooks, settings.hook_timeout_seconds)
            training = Training(swarm, hooks, settings, stats)
        upstream: Upstream | None = None
        if (upstream_key := planned.upstream_key) is not None:
            upstream = self._upstreams.get(upstream_key)
            if upstream is None:
                upstream = self._upstreams[upstream_key] = await Upstream(*upstream_key).__aenter__()
        return Route(planned.name, settings, planned.names, planned.answers_to_served, training, upstream, stats)

    async def _retire(self, old: _Generation) -> None:
        await old.table.unused()
        async with self._changing:
            self._older.remove(old)
            kept = [planned for generation in (*self._older, self._current) for planned in generation.plan.routes]
            swarm_keys = {planned.swarm_key for planned in kept}
            upstream_keys = {planned.upstream_key for planned in kept}
            swarms = [self._swarms.pop(key) for key in set(self._swarms) - swarm_keys]
            upstreams = [self._upstreams.pop(key) for key in set(self._upstreams) - upstream_keys]
        for upstream in upstreams:
            await upstream.__aexit__(None, None, None)
        seconds = max(route.lingering_seconds for route in old.table.routes)
        async with asyncio.TaskGroup() as group:
            for swarm in swarms:
                group.create_task(_close(swarm, seconds))

    async def __aenter__(self) -> Self:
        self._now = await self._connected(self._first)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        async with AsyncExitStack() as closing:
            for upstream in self._upstreams.values():
                closing.push_async_exit(upstream)
            async with asyncio.TaskGroup() as group:
                for one in self._swarms.values():
                    group.create_task(_close(one, 0))
                group.create_task(self._background.__aexit__(None, None, None))


async def _close(swarm: Swarm, seconds: float) -> None:
    await swarm.background.settle(seconds)
    await swarm.__aexit__(None, None, None)
