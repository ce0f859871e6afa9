"""``RouteTable``: from a model name and a caller to a route; ``LiveRoutes``: the connected table, and its exchange for
that of a new configuration.

Invariant: a name leads to at most one route, and to none that the caller's key does not open: whole names win over
patterns, and longer patterns over shorter ones. A request ends on the
table it began with; connections that only old tables use are closed after their last request and its background work,
and connections that a new table goes on using are never interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

from gateway.observability.scrubbing import without_credentials
from gateway.rollout.server import Swarm, Training, Waiting
from gateway.routing.plan import Plan, PlannedRoute, SwarmKey, UpstreamKey
from gateway.routing.upstream import Upstream
from gateway.stats import Stats
from gateway.takeover.shadow import Shadow
from gateway.takeover.suites import Examination
from gateway.types import Caller
from reward_hooks import HookRunner
from swarm.cards import model_card
from swarm.concurrency import Background
from swarm.errors import ForbiddenError, NotFoundError, SwarmGatewayError, UnavailableError
from swarm.protocol import FollowedRoute

#: Grace of the work that closes old connections, at shutdown: more than a swarm server's own.
_LAST_SECONDS = 20.0


@dataclass(frozen=True, eq=False)
class Route(PlannedRoute):
    """A connected route.

    Attributes:
        trainings: what samples and trains, by the label of callers with a share of their own, and for all others
            (empty); without any a plain upstream answers everything.
        upstream: answers, untrained, when the swarm cannot.
        stats: of its requests since the gateway started, reloads included.
        shadow: what happens behind its incumbent; ``None``: it has none.
    """

    trainings: Mapping[str, Training]
    upstream: Upstream | None
    stats: Stats
    shadow: Shadow | None

    @property
    def training(self) -> Training | None:
        """What samples and trains the requests of most callers."""
        return self.trainings.get("")

    def training_of(self, caller: Caller) -> Training | None:
        """What samples and trains the requests of ``caller``; ``None``: a plain upstream answers everything."""
        return self.trainings.get(caller.label, self.training)

    @property
    def swarm(self) -> Swarm | None:
        """The swarm server, if it has one."""
        return self.training.swarm if self.training is not None else None

    @property
    def plain(self) -> bool:
        """Whether its upstream answers every request: nothing trains, or an incumbent stands before what does."""
        return self.training is None or self.shadow is not None

    @property
    def served(self) -> str:
        """The last known model of its swarm."""
        return self.training.swarm.report.model if self.training is not None else ""

    @property
    def all_names(self) -> list[str]:
        """The whole names that lead here now."""
        own = [self.served] if self.answers_to_served and self.served else []
        return list(dict.fromkeys([*own, *self.names]))

    @property
    def lingering_seconds(self) -> float:
        """The longest that work of an answered request goes on."""
        settings = self.settings
        window = self.training.window_seconds if self.training is not None else 0.0
        judging = 2 * settings.hook_timeout_seconds
        return settings.sample_timeout_seconds + window + judging + settings.submit_timeout_seconds


class RouteTable:
    """The connected routes of one plan."""

    def __init__(self, plan: Plan, routes: Sequence[Route]) -> None:
        self.plan = plan
        self.routes = tuple(routes)
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._default = next((route for route in routes if route.is_default), None)
        self._named = {name: route for route in routes for name in route.names}
        matching = [(pattern, route) for route in routes for pattern in route.patterns]
        self._patterns = sorted(matching, key=lambda entry: len(entry[0]), reverse=True)
        self._by_served = [route for route in routes if route.answers_to_served and route.swarm is not None]

    @contextmanager
    def held(self) -> Generator[RouteTable]:
        """Keep the routes connected inside the block."""
        self._users += 1
        self._unused.clear()
        try:
            yield self
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def unused(self) -> None:
        """Return once nobody holds it."""
        await self._unused.wait()

    async def find(self, model: str | None, caller: Caller) -> Route:
        """The route for ``model``.

        Raises:
            NotFoundError: there is none; says which names there are.
            ForbiddenError: the caller's key does not open it.
            UnavailableError: the name may be served by one of several swarm servers that have not answered yet.
        """
        route = self._named.get(model or "") or await self._find_unnamed(model) or self._default
        if route is None:
            raise self._unknown(model, caller)
        if not caller.opens(route.name):
            raise ForbiddenError(
                f"this key does not open the route {route.name!r}; it opens {_listed(caller.routes or ())}",
                code="route_not_allowed",
                param="model",
            )
        return route

    async def models(self, caller: Caller) -> list[dict[str, Any]]:
        """Model cards of the names that ``caller`` may use, and those of a default route that is a plain upstream.

        Raises:
            UnavailableError: no swarm server has had a job within ``offline_wait_seconds``, and nothing else is known.
        """
        mine = [route for route in self.routes if caller.opens(route.name)]
        served = [route for route in mine if route in self._by_served]
        await self._read_statuses()
        if served and not any(route.all_names for route in mine):
            error = UnavailableError("the swarm server is down or has no training job yet", code="engine_offline")
            await self._wait_until(lambda: any(route.served for route in served), served[0], error)
        cards = {name: _card(name, route) for route in mine for name in route.all_names}
        default = self._default
        if default is not None and default in mine and default.plain and default.upstream is not None:
            own = default.all_names
            for card in await default.upstream.models():
                name = str(card["id"])
                if name in own or name not in cards:
                    cards[name] = {**model_card(name), **card}
        return list(cards.values())

    async def model(self, name: str, caller: Caller) -> dict[str, Any]:
        """The model card of one name; errors as of :meth:`find` and :meth:`models`."""
        for card in await self.models(caller):
            if card["id"] == name:
                return card
        route = await self.find(name, caller)
        return _card(name, route)

    async def _find_unnamed(self, model: str | None) -> Route | None:
        """The route for what is no whole name of the configuration: its swarm serves it, or its pattern fits."""
        if not model:
            return self.routes[0] if len(self.routes) == 1 else None
        if (route := self._served_as(model)) is not None:
            return route
        await self._read_statuses()
        matching = next((route for pattern, route in self._patterns if fnmatchcase(model, pattern)), None)
        if self._default is None and matching is None and (silent := self._silent()):
            urls = ", ".join(without_credentials(route.settings.swarm_url or "") for route in silent)
            error = UnavailableError(
                f"whether {model!r} is served at {urls} is not known while they are down; `models` of a route says it",
                code="engine_offline",
            )
            await self._wait_until(lambda: self._served_as(model) or len(self._silent()) <= 1, silent[0], error)
        silent = self._silent()
        # a swarm server that has not answered yet may serve it; its route waits for it, or falls back
        return self._served_as(model) or matching or (silent[0] if len(silent) == 1 else None)

    def _silent(self) -> list[Route]:
        """Routes whose swarm server has not named its model yet."""
        return [route for route in self._by_served if not route.served]

    async def _wait_until(self, condition: Callable[[], object], route: Route, error: UnavailableError) -> None:
        """Read the statuses until ``condition`` holds.

        Raises:
            UnavailableError: ``error``, once the ``offline_wait_seconds`` of ``route`` are over.
        """
        waiting = Waiting(route.settings)
        while not condition():
            await waiting.after(error)
            await self._read_statuses()

    def _served_as(self, model: str) -> Route | None:
        return next((route for route in self._by_served if route.served == model), None)

    async def _read_statuses(self) -> None:
        swarms = {route.swarm for route in self._by_served if route.swarm is not None}
        # of a server that has named its model, the last known will do: requests of other routes are not to wait for it
        await asyncio.gather(*(swarm.last_known() if swarm.report.model else swarm.fresh_report() for swarm in swarms))

    def _unknown(self, model: str | None, caller: Caller) -> SwarmGatewayError:
        mine = [route for route in self.routes if caller.opens(route.name)]
        names = [name for route in mine for name in (*route.all_names, *route.patterns)]
        if not model:
            text = f"Name a model: this gateway serves {_listed(names)}."
        else:
            text = (
                f"The model `{model}` does not exist. This gateway serves {_listed(names)}: ask for that, or add "
                f"`{model}` to the gateway's model_aliases, or to the models of a route; a pattern such as `claude-*` "
                "will do too."
            )
        return NotFoundError(text, code="model_not_found", param="model")


def _card(name: str, route: Route) -> dict[str, Any]:
    if route.plain or route.swarm is None:
        return model_card(name)
    return model_card(name, root=route.served or name, max_model_len=route.swarm.report.max_model_len)


def _listed(names: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "nothing"


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
        self._swarms: dict[SwarmKey, Swarm] = {}
        self._upstreams: dict[UpstreamKey, Upstream] = {}
        self.stats: dict[str, Stats] = {}
        self._now: RouteTable | None = None
        self._older: list[RouteTable] = []
        self._examining: list[asyncio.Task[None]] = []
        self._retiring: list[asyncio.Task[None]] = []
        self._changing = asyncio.Lock()

    @property
    def plan(self) -> Plan:
        """The current one."""
        return self.table.plan

    @property
    def table(self) -> RouteTable:
        """The current routes; hold the table (:meth:`RouteTable.held`) to go on using them."""
        assert self._now is not None, "used outside of its context"
        return self._now

    @property
    def swarms(self) -> list[Swarm]:
        """Of the current routes, and of older ones while they are used."""
        return list(self._swarms.values())

    async def change(self, plan: Plan) -> None:
        """Route new requests by ``plan``; old connections are closed in the background."""
        async with self._changing:
            old = self.table
            await self._begin(plan)
            self._older.append(old)
            retiring = self._background.start(self._retire(old), "closing the connections of an old configuration")
            self._retiring = [*(task for task in self._retiring if not task.done()), retiring]

    async def _begin(self, plan: Plan) -> None:
        self._now = RouteTable(plan, [await self._route(planned) for planned in plan.routes])
        self._follow()
        self._examine()

    async def _route(self, planned: PlannedRoute) -> Route:
        settings, stats = planned.settings, self.stats.setdefault(planned.name, Stats())
        trainings: dict[str, Training] = {}
        if planned.hooks is not None:
            hooks = HookRunner(planned.hooks, settings.hook_timeout_seconds)
            apart = planned.gate_hooks
            gate = HookRunner(apart, settings.hook_timeout_seconds) if apart is not None else None
            for label, swarm_key in planned.swarm_keys.items():
                if (swarm := self._swarms.get(swarm_key)) is None:
                    swarm = self._swarms[swarm_key] = await Swarm(*swarm_key).__aenter__()
                suites = tuple(suite.key for suite in planned.suites)
                trainings[label] = Training(swarm, hooks, settings, stats, gate, suites)
        upstream: Upstream | None = None
        if (upstream_key := planned.upstream_key) is not None:
            upstream = self._upstreams.get(upstream_key)
            if upstream is None:
                upstream = self._upstreams[upstream_key] = await Upstream(*upstream_key).__aenter__()
        serve = planned.settings.serve
        shadow: Shadow | None = None
        if serve is not None:
            shadow = Shadow(planned.name, serve, stats, trainings[""].swarm.stages)
            for before in self._now.routes if self._now is not None else ():
                if before.name == planned.name and before.shadow is not None:
                    shadow.sides.go_on_from(before.shadow.sides)
        return Route(**vars(planned), trainings=trainings, upstream=upstream, stats=stats, shadow=shadow)

    def _follow(self) -> None:
        """Follow the stages of the current routes, and of no others."""
        for swarm in self._swarms.values():
            swarm.stages.follow(
                FollowedRoute(
                    route=route.name,
                    incumbent=serve.incumbent_name,
                    incumbent_version=serve.incumbent.version,
                    rules=training.stage_rules,
                )
                for route in self.table.routes
                if (training := route.training) is not None and training.swarm is swarm
                if (serve := training.settings.serve) is not None
            )

    def _examine(self) -> None:
        """Ask the suites of the current routes, and of no others."""
        _cancel(self._examining)
        routes = [route for route in self.table.routes if route.suites]
        self._examining = [
            self._background.start(_examined(route), f"asking the suites of {route.name}") for route in routes
        ]

    async def _retire(self, old: RouteTable) -> None:
        await old.unused()
        async with self._changing:
            self._older.remove(old)
            kept = [route for table in (*self._older, self.table) for route in table.routes]
            swarm_keys = {key for route in kept for key in route.swarm_keys.values()}
            upstream_keys = {route.upstream_key for route in kept}
            swarms = [self._swarms.pop(key) for key in set(self._swarms) - swarm_keys]
            upstreams = [self._upstreams.pop(key) for key in set(self._upstreams) - upstream_keys]
        seconds = max(route.lingering_seconds for route in old.routes)
        async with asyncio.TaskGroup() as group:
            for upstream in upstreams:
                group.create_task(upstream.__aexit__(None, None, None))
            for swarm in swarms:
                group.create_task(_close(swarm, seconds))

    async def __aenter__(self) -> Self:
        await self._begin(self._first)
        return self

    async def __aexit__(self, *_: object) -> None:
        # groups of old connections do not wait for their users any more, either
        _cancel([*self._examining, *self._retiring])
        async with AsyncExitStack() as closing:
            for upstream in self._upstreams.values():
                closing.push_async_exit(upstream)
            async with asyncio.TaskGroup() as group:
                for swarm in self._swarms.values():
                    group.create_task(_close(swarm, 0))
                group.create_task(self._background.__aexit__(None, None, None))


async def _examined(route: Route) -> None:
    shadow, training, key = route.shadow, route.training, route.upstream_key
    assert shadow is not None and training is not None and key is not None, "only a route that serves has suites"
    # connections of its own: what the incumbent cannot answer opens no breaker before a user
    async with Upstream(*key) as upstream:
        await Examination(route.suites, shadow, training, lambda incoming: upstream.relay(incoming, "")).run()


def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()


async def _close(swarm: Swarm, seconds: float) -> None:
    """Close once its work is done, after so many ``seconds``, or when this is cancelled."""
    try:
        await swarm.background.settle(seconds)
    finally:
        await swarm.__aexit__(None, None, None)
