"""The routes that run, and their exchange for those of a new configuration.

Invariant: a request ends on the table it began with; what only old tables use is closed after their last request and
the work it left behind, and what a new table goes on using is never interrupted.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from gateway.background import Background
from gateway.config import UpstreamConfig
from gateway.routing.plan import Plan, PlannedRoute
from gateway.routing.route import Route
from gateway.routing.swarm import Swarm
from gateway.routing.table import RouteTable
from gateway.routing.upstream import Upstream
from gateway.stats import Stats
from reward_hooks import HookRunner

logger = logging.getLogger(__name__)

#: Work of plain upstreams that outlives a request, at shutdown.
_LAST_SECONDS = 15.0

_SwarmKey = tuple[str, str]
_UpstreamKey = tuple[UpstreamConfig, float]


@dataclass(frozen=True, slots=True, eq=False)
class _Generation:
    """One plan and its table."""

    plan: Plan
    table: RouteTable

    @property
    def lingering_seconds(self) -> float:
        return max(route.lingering_seconds for route in self.table.routes)


class LiveRoutes:
    """Holds the current table; an async context that closes everything.

    Args:
        plan: what to run first.
    """

    def __init__(self, plan: Plan) -> None:
        self._first = plan
        self._background = Background(grace_seconds=_LAST_SECONDS)
        self._swarms: dict[_SwarmKey, Swarm] = {}
        self._upstreams: dict[_UpstreamKey, Upstream] = {}
        self._stats: dict[str, Stats] = {}
        self._now: _Generation | None = None
        self._older: list[_Generation] = []
        self._changing = asyncio.Lock()

    @property
    def plan(self) -> Plan:
        """What runs now."""
        return self._current.plan

    @property
    def table(self) -> RouteTable:
        """The routes now; who goes on using them holds them (:meth:`RouteTable.held`)."""
        return self._current.table

    @property
    def stats(self) -> dict[str, Stats]:
        """Of each route by its name, those that are gone included."""
        return self._stats

    @property
    def swarms(self) -> list[Swarm]:
        """Of the current routes, and of older ones while they are used."""
        return list(self._swarms.values())

    async def change(self, plan: Plan) -> None:
        """Let requests from now on go by ``plan``; returns at once, old connections are closed behind."""
        async with self._changing:
            old = self._current
            self._now = await self._connected(plan)
            self._older.append(old)
            for swarm in self._swarms.values():
                # of the sizes and times of the old configuration
                swarm.episodes.standby.release()
            self._background.start(self._retire(old), "closing what a new configuration does not use")

    @property
    def _current(self) -> _Generation:
        assert self._now is not None, "used outside of its context"
        return self._now

    async def _connected(self, plan: Plan) -> _Generation:
        routes = [await self._route(planned) for planned in plan.routes]
        default = next((route for route, planned in zip(routes, plan.routes, strict=True) if planned.is_default), None)
        return _Generation(plan, RouteTable(routes, default))

    async def _route(self, planned: PlannedRoute) -> Route:
        settings = planned.settings
        swarm: Swarm | None = None
        if (swarm_key := _swarm_key(planned)) is not None and (swarm := self._swarms.get(swarm_key)) is None:
            swarm = self._swarms[swarm_key] = await Swarm(*swarm_key).__aenter__()
        upstream: Upstream | None = None
        if (upstream_key := _upstream_key(planned)) is not None:
            upstream = self._upstreams.get(upstream_key)
            if upstream is None:
                upstream = self._upstreams[upstream_key] = await Upstream(*upstream_key).__aenter__()
        return Route(
            name=planned.name,
            settings=settings,
            names=planned.names,
            answers_to_served=planned.answers_to_served,
            swarm=swarm,
            upstream=upstream,
            hooks=HookRunner(planned.hooks, settings.hook_timeout_seconds) if planned.hooks is not None else None,
            stats=self._stats.setdefault(planned.name, Stats()),
            background=swarm.background if swarm is not None else self._background,
        )

    async def _retire(self, old: _Generation) -> None:
        await old.table.unused()
        async with self._changing:
            self._older.remove(old)
            kept = [planned for generation in (*self._older, self._current) for planned in generation.plan.routes]
            swarm_keys = {_swarm_key(planned) for planned in kept}
            upstream_keys = {_upstream_key(planned) for planned in kept}
            swarms = [self._swarms.pop(key) for key in set(self._swarms) - swarm_keys]
            upstreams = [self._upstreams.pop(key) for key in set(self._upstreams) - upstream_keys]
        for upstream in upstreams:
            await upstream.__aexit__(None, None, None)
        async with asyncio.TaskGroup() as group:
            for swarm in swarms:
                group.create_task(_close(swarm, old.lingering_seconds))

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


def _swarm_key(planned: PlannedRoute) -> _SwarmKey | None:
    settings = planned.settings
    if settings.swarm_url is None:
        return None
    return settings.swarm_url.rstrip("/"), settings.swarm_token.get_secret_value()


def _upstream_key(planned: PlannedRoute) -> _UpstreamKey | None:
    settings = planned.settings
    return (settings.upstream, settings.sample_timeout_seconds) if settings.upstream is not None else None
