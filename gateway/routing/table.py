"""``Route``: the servers behind some model names; ``RouteTable``: from a model name and a caller to a route.

Invariant: a name leads to at most one route, and to none that the caller's key does not open. A route never changes: a
reload makes new ones, and a request ends on the one it began with.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from gateway.config.route import RouteSettings
from gateway.rollout.swarm import Swarm, Training
from gateway.routing.upstream import Upstream
from gateway.stats import Stats
from gateway.types import Caller
from swarm.cards import model_card
from swarm.errors import ForbiddenError, NotFoundError, SwarmGatewayError, UnavailableError

logger = logging.getLogger(__name__)

#: Deadline of an upstream that lists its models.
_LIST_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Route:
    """Where the requests for some model names go.

    Attributes:
        name: in keys, metrics and logs.
        settings: how it answers.
        names: that applications may ask for, apart from the model that the swarm serves.
        answers_to_served: whether the name of the swarm's model leads here too.
        training: samples and trains; ``None``: a plain upstream answers everything.
        upstream: answers, untrained, when the swarm cannot.
        stats: of its requests since the gateway started, reloads included.
    """

    name: str
    settings: RouteSettings
    names: tuple[str, ...]
    answers_to_served: bool
    training: Training | None
    upstream: Upstream | None
    stats: Stats

    @property
    def swarm(self) -> Swarm | None:
        """The swarm server, if it has one."""
        return self.training.swarm if self.training is not None else None

    @property
    def served(self) -> str:
        """The last known model of its swarm."""
        return self.training.swarm.episodes.known.model if self.training is not None else ""

    @property
    def all_names(self) -> list[str]:
        """What leads here now."""
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
    """The routes of one configuration; ``default`` takes what names no model or an unknown one."""

    def __init__(self, routes: Sequence[Route], default: Route | None) -> None:
        self.routes = tuple(routes)
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._default = default
        self._named = {name: route for route in routes for name in route.names}
        self._by_served = [route for route in routes if route.answers_to_served and route.swarm is not None]

    @contextmanager
    def held(self) -> Generator[RouteTable]:
        """Keep the routes connected inside the block."""
        self.hold()
        try:
            yield self
        finally:
            self.release()

    def hold(self) -> None:
        """Keep the routes connected until :meth:`release`, which must be called as often."""
        self._users += 1
        self._unused.clear()

    def release(self) -> None:
        """See :meth:`hold`."""
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
        route = self._named.get(model or "") or await self._find_served(model) or self._default
        if route is None:
            raise await self._unknown(model, caller)
        if not _opens(caller, route):
            raise ForbiddenError(
                f"this key does not open the route {route.name!r}; it opens {_listed(caller.routes or ())}",
                code="route_not_allowed",
                param="model",
            )
        return route

    async def models(self, caller: Caller) -> list[dict[str, Any]]:
        """Model cards of the names that ``caller`` may use, and those of a default route that is a plain upstream.

        Raises:
            UnavailableError: nothing is known yet.
        """
        await self._read_statuses()
        cards = {name: _card(name, route) for route in self.routes if _opens(caller, route) for name in route.all_names}
        default = self._default
        if default is not None and default.swarm is None and default.upstream is not None and _opens(caller, default):
            for card in await _models_of(default.upstream):
                cards.setdefault(str(card["id"]), {**model_card(str(card["id"])), **card})
        if not cards and any(_opens(caller, route) for route in self._by_served):
            raise UnavailableError("the swarm server is down or has no training job yet", code="engine_offline")
        return list(cards.values())

    async def model(self, name: str, caller: Caller) -> dict[str, Any]:
        """The model card of one name; errors as of :meth:`find` and :meth:`models`."""
        for card in await self.models(caller):
            if card["id"] == name:
                return card
        route = await self.find(name, caller)
        return _card(name, route)

    async def _find_served(self, model: str | None) -> Route | None:
        if not model:
            return self.routes[0] if len(self.routes) == 1 else None
        if (route := self._serving(model)) is not None:
            return route
        if not self._by_served:
            return None
        await self._read_statuses()
        if (route := self._serving(model)) is not None:
            return route
        silent = [route for route in self._by_served if not route.served]
        if self._default is None and len(silent) > 1:
            urls = ", ".join(route.settings.swarm_url or "" for route in silent)
            raise UnavailableError(
                f"whether {model!r} is served at {urls} is not known while they are down; `models` of a route says it"
            )
        # a swarm server that has not answered yet may serve it; its route waits for it, or falls back
        return silent[0] if len(silent) == 1 else None

    def _serving(self, model: str) -> Route | None:
        return next((route for route in self._by_served if route.served == model), None)

    async def _read_statuses(self) -> None:
        swarms = {route.swarm for route in self._by_served if route.swarm is not None}
        await asyncio.gather(*(swarm.episodes.serving() for swarm in swarms))

    async def _unknown(self, model: str | None, caller: Caller) -> SwarmGatewayError:
        names = [name for route in self.routes if _opens(caller, route) for name in route.all_names]
        if not model:
            text = f"Name a model: this gateway serves {_listed(names)}."
        else:
            text = (
                f"The model `{model}` does not exist. This gateway serves {_listed(names)}: ask for that, or add "
                f"`{model}` to the gateway's model_aliases, or to the models of a route."
            )
        return NotFoundError(text, code="model_not_found", param="model")


def _opens(caller: Caller, route: Route) -> bool:
    return caller.routes is None or route.name in caller.routes


async def _models_of(upstream: Upstream) -> list[dict[str, Any]]:
    """The upstream's list; empty if it fails, which must not hide the other routes."""
    body = bytearray()
    try:
        async with asyncio.timeout(_LIST_SECONDS):
            listed = await upstream.forward("GET", "/v1/models", {}, b"")
            try:
                if isinstance(listed.body, bytes):
                    body += listed.body
                else:
                    async for part in listed.body:
                        body += part
            finally:
                if listed.close is not None:
                    await listed.close()
        data: Any = json.loads(body) if listed.status == 200 else None
    except (SwarmGatewayError, TimeoutError, ValueError) as exc:
        logger.warning("listing the models of an upstream failed: %s", exc or "timeout")
        return []
    cards = cast("dict[str, Any]", data).get("data") if isinstance(data, dict) else None
    if not isinstance(cards, list):
        return []
    return [card for card in cast("list[Any]", cards) if isinstance(card, dict) and "id" in card]


def _card(name: str, route: Route) -> dict[str, Any]:
    known = route.swarm.episodes.known.max_model_len if route.swarm is not None else None
    return model_card(name, root=route.served or name, max_model_len=known)


def _listed(names: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "nothing"
