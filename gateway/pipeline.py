"""From a request to its outcome: the stages, in order.

Invariant: an error means that nothing of the request was trained; what a request holds it holds until its outcome is
closed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace

from adapters.dialects import ChatDialect
from gateway.fanout.episodes import Waiting
from gateway.fanout.group import FanOut, GroupResult
from gateway.fanout.sampling import EpisodeLostError
from gateway.forms import Decided, Incoming, Outcome
from gateway.guarding import Admission, Joining
from gateway.routing import LiveRoutes, Route, RouteTable
from gateway.sessions import Sessions
from gateway.stats import DropReason, Stats
from swarm.errors import SwarmGatewayError, UnavailableError, UpstreamError

#: Each lost group was aborted, so repeating costs samples but never trains twice.
_GROUPS_PER_REQUEST = 3


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
        async with AsyncExitStack() as held:
            table = held.enter_context(self._routes.table.held())
            route = await table.find(incoming.call.model, incoming.caller)
            held.enter_context(_counted(route.stats))
            outcome = await self._joining.run(incoming, route, lambda: self._admitted(incoming, route, table))
            if outcome.close is not None:
                held.push_async_callback(outcome.close)
            return replace(outcome, close=held.pop_all().aclose)

    async def _admitted(self, incoming: Incoming, route: Route, table: RouteTable) -> Outcome:
        # who joins another's work may leave before that work ends: it holds its routes and its place itself
        async with AsyncExitStack() as held:
            held.enter_context(table.held())
            place = await held.enter_async_context(self._admission.place(route, incoming.caller, len(incoming.raw)))
            outcome = place.keep(await self._produce(incoming, route))
            if outcome.close is not None:
                held.push_async_callback(outcome.close)
                outcome = replace(outcome, close=held.pop_all().aclose)
            return outcome

    async def _produce(self, incoming: Incoming, route: Route) -> Outcome:
        if route.swarm is None:
            assert route.upstream is not None
            return await route.upstream.relay(incoming, "")
        try:
            return await _best(route, incoming)
        except (UnavailableError, UpstreamError) as exc:
            if route.upstream is None:
                raise
            reason = exc.code or DropReason.UNAVAILABLE
            route.stats.fallbacks[reason] += 1
            return await route.upstream.relay(incoming, reason)


@contextmanager
def _counted(stats: Stats) -> Generator[None]:
    stats.requests += 1
    stats.in_flight += 1
    try:
        yield
    except SwarmGatewayError as exc:
        stats.errors[exc.code or exc.type] += 1
        raise
    finally:
        stats.in_flight -= 1


async def _best(route: Route, incoming: Incoming) -> Decided:
    assert route.swarm is not None and route.hooks is not None
    swarm, call, dialect = route.swarm, incoming.call, ChatDialect()
    fan_out = FanOut(
        route.settings, swarm.episodes, swarm.sampler, route.hooks, swarm.submitter, route.background, route.stats
    )
    waited = Waiting(route.settings, route.window_seconds)
    for left in reversed(range(_GROUPS_PER_REQUEST)):
        serving = await swarm.episodes.wait_for_job(waited)
        try:
            result = await fan_out.run(dialect, call, incoming.headers, waited, serving)
            return _decided(dialect, incoming, result)
        except EpisodeLostError as exc:
            if not left:
                raise
            # sampling has taken its time; the wait for the next group is a new one
            waited = Waiting(route.settings, route.window_seconds)
            await waited.after(exc)
    raise AssertionError("unreachable")


def _decided(dialect: ChatDialect, incoming: Incoming, result: GroupResult) -> Decided:
    answer_id = f"chatcmpl-{result.group_id}"

    async def chunks() -> AsyncIterator[dict[str, object]]:
        for chunk in dialect.chunks(
            result.answers, answer_id, include_usage=incoming.call.include_usage, last={"swarm": result.report()}
        ):
            yield chunk

    return Decided(dialect.completion(result.answers, answer_id), chunks, result.headers())
