"""``GET /metrics``: the metrics that Prometheus scrapes.

Invariant: counts that the gateway's parts keep are read at the scrape; a slow swarm server delays it by no more than a
status request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from gateway.observability.scrubbing import without_credentials
from gateway.routing.breaker import BreakerState
from gateway.stats import RECENT_GROUPS, Stats
from swarm.http.exposition import counter, exposition, gauge

if TYPE_CHECKING:
    from gateway.runtime import Gateway


async def metrics(request: Request) -> Response:
    """Everything, in Prometheus' text form."""
    gateway: Gateway = request.state.gateway
    await asyncio.gather(*(swarm.last_known() for swarm in gateway.routes.swarms))
    return exposition(gateway.telemetry.metrics.registry)


class GatewayCollector(Collector):
    """The state of one gateway, read at each scrape."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        gateway = self._gateway
        yield from _groups(gateway.routes.stats)
        yield counter("gateway_reload_failures", "Reloads that a wrong configuration failed", gateway.reload_failures)
        yield counter("gateway_errors", "Errors that callers got, by code", gateway.door.errors, "code")
        yield from _limits(gateway)
        yield from _swarms(gateway)
        yield from _sessions(gateway)
        if (log := gateway.telemetry.request_log) is not None:
            yield counter("gateway_request_log_lost", "Lines of the request log that were not written", log.lost)


def _groups(stats: dict[str, Stats]) -> Iterator[Metric]:
    def by(counts: Callable[[Stats], Mapping[str, float]]) -> dict[tuple[str, str], float]:
        return {
            (name, kind): count for name, route_stats in stats.items() for kind, count in counts(route_stats).items()
        }

    chosen = by(lambda route: route.answers)
    yield counter("gateway_answers", "Answers by how they were chosen", chosen, "route", "chosen")
    groups = {name: route.groups for name, route in stats.items()}
    recent = {name: route.recent for name, route in stats.items() if route.recent.groups}
    trained = {name: counted.trained for name, counted in groups.items()}
    yield counter("gateway_trained_groups", "Groups that the swarm server acknowledged", trained, "route")
    yield counter(
        "gateway_dropped_groups",
        "Groups that were not trained",
        by(lambda route: route.groups.dropped),
        "route",
        "reason",
    )
    yield counter(
        "gateway_submitted_groups",
        "Groups by whether their rewards differ",
        by(lambda route: {"true": route.groups.informative, "false": route.groups.uninformative}),
        "route",
        "informative",
    )
    lately = f"over the latest {RECENT_GROUPS} judged groups of the route"
    yield gauge(
        "gateway_informative_group_share",
        f"Share (0 to 1) of groups whose rewards differ, {lately}",
        {name: window.with_signal / window.groups for name, window in recent.items()},
        "route",
    )
    yield gauge(
        "gateway_reward_mean",
        f"Mean reward of all answers, in the hook's own units, {lately}",
        {name: window.reward / window.groups for name, window in recent.items()},
        "route",
    )
    yield gauge(
        "gateway_reward_spread",
        f"Standard deviation of the rewards within a group, its mean {lately}",
        {name: window.spread / window.groups for name, window in recent.items()},
        "route",
    )
    yield counter(
        "gateway_tokens",
        "Completion tokens of groups: delivered, or wasted on answers that nobody got",
        by(lambda route: {"delivered": route.tokens.delivered, "wasted": route.tokens.wasted}),
        "route",
        "fate",
    )
    yield counter(
        "gateway_prompt_tokens",
        "Prompt tokens of groups, once each: computed, or cached by the engine; without engines that do not tell",
        by(lambda route: {"computed": route.prompts.computed, "cached": route.prompts.cached}),
        "route",
        "source",
    )
    malformed = {name: route.malformed_calls for name, route in stats.items()}
    yield counter("gateway_malformed_calls", "Tool calls whose arguments are no JSON object", malformed, "route")
    passed, failures = by(lambda route: route.passed_through), by(lambda route: route.hook_failures)
    yield counter("gateway_passed", "Requests answered once by a rule of pass_through", passed, "route", "rule")
    yield counter("gateway_hook_failures", "Hook calls without a result, by kind", failures, "route", "code")
    withheld = by(lambda route: route.withheld)
    yield counter(
        "gateway_withheld", "Requests and groups neither kept nor trained for private data", withheld, "route", "where"
    )
    fallbacks = by(lambda route: route.fallbacks)
    yield counter(
        "gateway_fallbacks", "Requests that were not answered by the swarm's group", fallbacks, "route", "reason"
    )
    shadows = by(lambda route: route.shadows)
    yield counter(
        "gateway_shadows", "Requests that an incumbent answered, by the challenger's group", shadows, "route", "outcome"
    )


def _limits(gateway: Gateway) -> Iterator[Metric]:
    routes = gateway.routes.table.routes
    loads = {route.name: gateway.admission.load(route.name) for route in routes}
    in_flight = {name: load.in_flight for name, load in loads.items()}
    yield gauge("gateway_in_flight", "Requests being served", in_flight, "route")
    queued = {name: load.queued for name, load in loads.items()}
    yield gauge("gateway_queued", "Requests that wait for a place", queued, "route")
    shed = {name: load.refused for name, load in loads.items()}
    yield counter("gateway_shed", "Requests refused with 429 for want of a place", shed, "route")
    yield counter("gateway_joined", "Retries that joined the request they repeat", gateway.retries.joined)
    breakers = {
        (route.name, state.value): float(state is route.upstream.state)
        for route in routes
        if route.upstream is not None
        for state in BreakerState
    }
    yield gauge(
        "gateway_breaker_state", "1 for the state of the breaker of a route's upstream", breakers, "route", "state"
    )


def _swarms(gateway: Gateway) -> Iterator[Metric]:
    # one address may occur twice: with two tokens, or left behind by an older configuration
    up, opened, background = dict[str, float](), Counter[str](), Counter[str]()
    closed = Counter[tuple[str, str]]()
    for swarm in gateway.routes.swarms:
        name = without_credentials(swarm.url)
        up[name] = min(up.get(name, 1.0), float(swarm.down_since is None))
        opened[name] += len(swarm.open_groups)
        background[name] += len(swarm.background)
        for why, count in swarm.open_groups.closed.items():
            closed[name, why] += count
    yield gauge("gateway_swarm_up", "1 while the swarm server answers", up, "swarm")
    yield gauge("gateway_open_groups", "Judged groups that wait for feedback or a session's end", opened, "swarm")
    yield counter("gateway_closed_groups", "Groups that were open, by why they closed", closed, "swarm", "why")
    yield gauge("gateway_background", "Pieces of work behind answers", background, "swarm")


def _sessions(gateway: Gateway) -> Iterator[Metric]:
    sessions, counts = gateway.sessions, gateway.sessions.counts
    yield gauge("gateway_sessions", "Open conversations", len(sessions))
    yield gauge("gateway_session_bytes", "Of their requests and answers", sessions.size)
    yield counter("gateway_linked_requests", "Requests that continue an answer, by what says so", counts.linked, "kind")
    yield counter("gateway_ended_sessions", "By why they ended", counts.ended, "kind")
    yield counter("gateway_signals", "What was observed of answers", counts.signals, "kind")
    yield counter("gateway_feedback", "Feedback that counts, or came too late to train", counts.feedback, "kind")
    yield counter(
        "gateway_session_hook_failures", "Session hooks without a result, by code", counts.hook_failures, "kind"
    )
    rewards = {"credited": counts.credited, "dropped": counts.credit_dropped}
    yield counter("gateway_session_rewards", "Rewards of turns by session hooks, by their fate", rewards, "fate")
