"""From a request to its outcome: the stages, in order.

Invariant: an error means that nothing of the request was trained; what a request holds it holds until its outcome is
closed.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.limits.admission import Admission, Place
from gateway.limits.retry_dedup import Joining
from gateway.observability.request import answered_by, phase
from gateway.rollout.best import best
from gateway.rollout.first import first
from gateway.rollout.policy import Policy
from gateway.rollout.unrecorded import straight
from gateway.routing.live import LiveRoutes
from gateway.routing.route import Route
from gateway.routing.table import RouteTable
from gateway.routing.upstream import Upstream
from gateway.sessions.sessions import Sessions
from gateway.stats import DropReason
from gateway.types import Incoming, Outcome, kept
from swarm.errors import SwarmGatewayError, UnavailableError, UpstreamError


class Pipeline:
    """Answers requests by the routes that are live; one per gateway, safe for concurrent requests."""

    def __init__(self, routes: LiveRoutes, admission: Admission, joining: Joining, sessions: Sessions) -> None:
        self._routes = routes
        self._admission = admission
        self._joining = joining
        self._sessions = sessions

    async def answer(self, incoming: Incoming) -> Outcome:
        """The outcome of one request; its ``close`` must be called once it is delivered or given up.

        Raises:
            RequestError: the request itself is at fault: its model, its headers, its fields.
            OverloadedError: too many requests at once.
            UnavailableError, UpstreamError: neither swarm nor upstream could answer.
        """
        table, stats = self._routes.table, None
        table.hold()

        def release() -> None:
            if stats is not None:
                stats.in_flight -= 1
            table.release()

        try:
            route = await table.find(incoming.call.model, incoming.caller)
            answered_by(route.name)
            stats = route.stats
            stats.requests += 1
            stats.in_flight += 1
            outcome = await self._joining.run(incoming, route, lambda: self._admitted(incoming, route, table))
        except BaseException as exc:
            if stats is not None and isinstance(exc, SwarmGatewayError):
                stats.errors[exc.code or exc.type] += 1
            release()
            raise
        return kept(outcome, release)

    async def _admitted(self, incoming: Incoming, route: Route, table: RouteTable) -> Outcome:
        # who joins another's work may leave before that work ends: it holds its routes and its place itself
        table.hold()
        place: Place | None = None

        def release() -> None:
            if place is not None:
                place.release()
            table.release()

        try:
            with phase("queue"):
                place = await self._admission.enter(route, incoming.caller, len(incoming.raw))
            outcome = await self._produce(incoming, route)
        except BaseException:
            release()
            raise
        return kept(outcome, release)

    async def _produce(self, incoming: Incoming, route: Route) -> Outcome:
        if route.swarm is None:
            assert route.upstream is not None
            return await _relayed(route, route.upstream, incoming, "")
        policy = Policy.of(route.settings, incoming.headers)
        trains = policy.trains(route.settings, route.name, incoming.request_id)
        patience = route.settings.offline_wait_seconds
        if (
            route.upstream is not None
            and route.upstream.available
            and (gone := route.swarm.episodes.gone_for(patience))
        ):
            # one who would wait in vain need not wait as long as those before
            return await self._otherwise(incoming, route, gone, engine=False)
        try:
            if not trains:
                return await _straight(route, incoming)
            session = self._sessions.link(incoming, route)
            answered_by(route.name, policy.kind)
            if policy.kind == "first":
                return await first(route, incoming, session)
            return await best(route, incoming, session, policy)
        except (UnavailableError, UpstreamError) as exc:
            return await self._otherwise(incoming, route, exc, engine=trains and isinstance(exc, UnavailableError))

    async def _otherwise(
        self, incoming: Incoming, route: Route, error: UnavailableError | UpstreamError, *, engine: bool
    ) -> Outcome:
        """The answer where the swarm gave none: the upstream's, else the ``engine``'s own without training if it serves
        now. The latter only where nothing was sampled yet."""
        reason = error.code or DropReason.UNAVAILABLE
        if route.upstream is not None:
            try:
                outcome = await _relayed(route, route.upstream, incoming, reason)
            except UnavailableError as exc:
                # its breaker is open, or it is out of reach
                error = exc
            else:
                route.stats.fallbacks[reason] += 1
                return outcome
        if not engine:
            raise error
        try:
            outcome = await _straight(route, incoming, patient=False)
        except (UnavailableError, UpstreamError):
            raise error from None
        route.stats.fallbacks[reason] += 1
        return replace(outcome, headers={**outcome.headers, "x-swarm-drop-reason": reason})


async def _relayed(route: Route, upstream: Upstream, incoming: Incoming, reason: str) -> Outcome:
    answered_by(route.name, "upstream")
    with phase("upstream"):
        return await upstream.relay(incoming, reason)


async def _straight(route: Route, incoming: Incoming, *, patient: bool = True) -> Outcome:
    answered_by(route.name, "straight")
    with phase("sample"):
        return await straight(route, incoming, patient=patient)
