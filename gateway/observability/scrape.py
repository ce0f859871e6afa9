"""``GET /metrics``: what Prometheus scrapes: what is measured of requests, and what the gateway's parts count.

Invariant: what parts count is read at the scrape, from them; a swarm server that is slow to say how it is delays it by
no more than a status.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from gateway.observability.scrubbing import without_credentials
from gateway.routing.breaker import BreakerState
from gateway.stats import Stats
from swarm.http.exposition import Labels, counter, counters, exposition, gauge, gauges

if TYPE_CHECKING:
    from gateway.runtime import Gateway


async def metrics(request: Request) -> Response:
    """Everything, in Prometheus' text form."""
    gateway: Gateway = request.state.gateway
    await asyncio.gather(*(swarm.episodes.last_known() for swarm in gateway.routes.swarms))
    return exposition(_families(gateway))


def _families(gateway: Gateway) -> Iterator[Metric]:
    yield from gateway.eyes.metrics.families()
    yield from _groups(gateway.routes.stats)
    yield counters("gateway_errors", "Errors that callers saw, by code", ("code",), _kinds(gateway.door.errors))
    yield from _guarding(gateway)
    yield from _swarms(gateway)
    yield from _sessions(gateway)
    if (log := gateway.eyes.request_log) is not None:
        yield counter("gateway_request_log_lost", "Lines of the request log that were not written", log.lost)


def _groups(stats: dict[str, Stats]) -> Iterator[Metric]:
    routes = stats.items()
    yield counters("gateway_trained_groups", "Groups that the swarm server acknowledged", ("route",), (
        ((name,), one.trained) for name, one in routes
    ))  # fmt: skip
    yield counters("gateway_dropped_groups", "Groups that were not trained", ("route", "reason"), (
        ((name, reason), count) for name, one in routes for reason, count in one.dropped.items()
    ))  # fmt: skip
    yield counters("gateway_submitted_groups", "Groups by whether their rewards differ", ("route", "informative"), (
        ((name, informative), count)
        for name, one in routes
        for informative, count in (("true", one.informative), ("false", one.uninformative))
    ))  # fmt: skip
    yield gauges("gateway_informative_group_share", "Of the groups submitted since the start", ("route",), (
        ((name,), one.informative / (one.informative + one.uninformative))
        for name, one in routes
        if one.informative + one.uninformative
    ))  # fmt: skip
    yield counters(
        "gateway_tokens", "Completion tokens of groups: delivered, or wasted on answers nobody got", ("route", "fate"),
        (((name, fate), count) for name, one in routes
         for fate, count in (("delivered", one.delivered_tokens), ("wasted", one.wasted_tokens))),
    )  # fmt: skip
    yield counters("gateway_hook_failures", "Hook calls without a result", ("route", "code"), (
        ((name, code), count) for name, one in routes for code, count in one.hook_failures.items()
    ))  # fmt: skip
    yield counters("gateway_fallbacks", "Requests that were not answered by the swarm's group", ("route", "reason"), (
        ((name, reason), count) for name, one in routes for reason, count in one.fallbacks.items()
    ))  # fmt: skip


def _guarding(gateway: Gateway) -> Iterator[Metric]:
    routes = gateway.routes.table.routes
    loads = [(route.name, gateway.admission.load(route.name)) for route in routes]
    yield gauges("gateway_in_flight", "Requests being served", ("route",), (
        ((name,), load.in_flight) for name, load in loads
    ))  # fmt: skip
    yield gauges("gateway_queued", "Requests that wait for a place", ("route",), (
        ((name,), load.queued) for name, load in loads
    ))  # fmt: skip
    yield counters("gateway_shed", "Requests that were sent away with 429 for want of a place", ("route",), (
        ((name,), load.refused) for name, load in loads
    ))  # fmt: skip
    yield counter("gateway_joined", "Retries that joined the request they repeat", gateway.retries.joined)
    yield gauges("gateway_breaker_state", "1 for the state of the breaker of a route's upstream", ("route", "state"), (
        ((route.name, state.value), float(state is route.upstream.state))
        for route in routes if route.upstream is not None
        for state in BreakerState
    ))  # fmt: skip


def _swarms(gateway: Gateway) -> Iterator[Metric]:
    # one address may be there twice: with two tokens, or with what an older configuration left behind
    up, opened, closed, behind = dict[str, float](), Counter[str](), Counter[Labels](), Counter[str]()
    for swarm in gateway.routes.swarms:
        name = without_credentials(swarm.url)
        up[name] = min(up.get(name, 1.0), float(swarm.episodes.down_since is None))
        opened[name] += len(swarm.open_groups)
        behind[name] += len(swarm.background)
        for why, count in swarm.open_groups.closed.items():
            closed[name, why] += count
    yield gauges("gateway_swarm_up", "1 while the swarm server answers", ("swarm",), _kinds(up))
    yield gauges(
        "gateway_open_groups", "Judged groups that wait for feedback or a session's end", ("swarm",), _kinds(opened)
    )
    yield counters(
        "gateway_closed_groups", "Groups that were open, by why they closed", ("swarm", "why"), closed.items()
    )
    yield gauges("gateway_background", "Pieces of work behind answers", ("swarm",), _kinds(behind))


def _sessions(gateway: Gateway) -> Iterator[Metric]:
    sessions, counts = gateway.sessions, gateway.sessions.counts
    yield gauge("gateway_sessions", "Conversations that go on", len(sessions))
    yield gauge("gateway_session_bytes", "Of their requests and answers", sessions.size)
    for name, help, counted in (
        ("gateway_linked_requests", "Requests that go on from an answer, by how that is known", counts.linked),
        ("gateway_ended_sessions", "By why they ended", counts.ended),
        ("gateway_signals", "What was observed of answers", counts.signals),
        ("gateway_feedback", "Feedback that counts, or came too late to train", counts.feedback),
        ("gateway_session_hook_failures", "Session hooks without a result, by code", counts.hook_failures),
    ):
        yield counters(name, help, ("kind",), _kinds(counted))
    yield counters("gateway_session_rewards", "Rewards of turns by session hooks, by their fate", ("fate",), (
        (("credited",), counts.credited), (("dropped",), counts.credit_dropped)
    ))  # fmt: skip


def _kinds(counted: Mapping[str, float]) -> Iterable[tuple[Labels, float]]:
    return (((kind,), count) for kind, count in counted.items())
