"""What a gateway reports about itself: ``GET /v1/models``, ``/version``, ``/ping``; for the operator ``GET /health``,
``GET /status``, ``GET /metrics`` (for Prometheus) and ``POST /admin/reload``.

Invariant: none of them waits for a slow swarm server longer than for one glance at its status. On loopback without keys
everybody on the machine is the operator.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.api.endpoint import caller_of
from gateway.observability.scrubbing import without_credentials
from gateway.routing.breaker import BreakerState
from gateway.routing.table import Route, RouteTable
from gateway.runtime import Gateway
from gateway.stats import RECENT_GROUPS, GatewayStatus, Recent, RouteLoad, RouteStatus, Stats
from swarm import __version__
from swarm.cards import model_list
from swarm.http.exposition import counter, exposition, gauge
from swarm.http.routes import OpenAIBody


class Reloaded(BaseModel):
    """The configuration and the hooks were read again. ``changed`` names the settings that differ; those that are in
    ``needs_restart`` too keep their old value until a restart."""

    routes: list[str]
    changed: list[str]
    needs_restart: list[str]


class Version(BaseModel):
    """As vLLM tells its own."""

    version: str


async def health(request: Request) -> Response:
    """Whether the gateway answers, and the engine's last known state."""
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        return JSONResponse({"status": "ok", **await _engine(table)})


async def ping(request: Request) -> Response:
    """Whether the gateway answers; without a body, as vLLM's."""
    return Response()


async def version(request: Request) -> Version:
    """The gateway's version."""
    return Version(version=__version__)


async def status(request: Request) -> GatewayStatus:
    """Counts since the start: in all, by route and by swarm server."""
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        engine = await _engine(table)
        total = sum(gateway.routes.stats.values(), start=Stats())
        # only the door counts requests that came to no route
        total.requests, total.in_flight = gateway.door.requests, gateway.door.in_flight
        total.errors = gateway.door.errors
        swarms = gateway.routes.swarms
        return GatewayStatus(
            **dict(total),
            **engine,
            background=sum(len(swarm.background) for swarm in swarms),
            control=gateway.routes.plan.config.control,
            joined=gateway.retries.joined,
            routes={route.name: _route(gateway, route) for route in table.routes},
            reload_failures=gateway.reload_failures,
            reload_error=gateway.reload_error,
            sessions=gateway.sessions.status(),
            swarms=[swarm.status() for swarm in swarms],
        )


async def metrics(request: Request) -> Response:
    """Everything, in Prometheus' text form."""
    gateway: Gateway = request.state.gateway
    await asyncio.gather(*(swarm.last_known() for swarm in gateway.routes.swarms))
    return exposition(gateway.telemetry.metrics.registry)


async def reload(request: Request) -> Reloaded:
    """Read the configuration file again; a wrong one changes nothing."""
    gateway: Gateway = request.state.gateway
    changed, needs_restart = await gateway.reload()
    routes = [route.name for route in gateway.routes.plan.routes]
    return Reloaded(routes=routes, changed=changed, needs_restart=needs_restart)


async def list_models(request: Request) -> OpenAIBody:
    """The models that the key may ask for."""
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        return OpenAIBody.model_validate(model_list(await table.models(caller_of(request.scope))))


async def get_model(request: Request, name: str) -> OpenAIBody:
    """One model."""
    if not name:
        # a slash at the end of the path of all
        return await list_models(request)
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        return OpenAIBody.model_validate(await table.model(name, caller_of(request.scope)))


def _route(gateway: Gateway, route: Route) -> RouteStatus:
    settings, load = route.settings, gateway.admission.load(route.name)
    server = route.swarm.report.status if route.swarm is not None and settings.serve is not None else None
    stage = route.shadow and route.shadow.sides.stage
    return RouteStatus(
        **dict(route.stats),
        models=route.all_names,
        # the password of an address is a token, and a key of an application reads this
        swarm_url=settings.swarm_url and without_credentials(settings.swarm_url),
        upstream=route.upstream_key and without_credentials(route.upstream_key[0].base_url),
        policy=settings.policy,
        train_fraction=settings.train_fraction,
        control=settings.control,
        load=RouteLoad(running=load.in_flight, waiting=load.queued, refused=load.refused),
        breaker=route.upstream and route.upstream.breaker.state,
        stage=stage and stage.label,
        stage_conflict=route.shadow.conflict if route.shadow is not None else "",
        verdicts=[verdict for verdict in server.comparisons if verdict.route == route.name] if server else [],
    )


async def _engine(table: RouteTable) -> dict[str, Any]:
    """The engine of the first route that has a swarm; all swarms are asked, so that their state is fresh."""
    swarms = dict.fromkeys(route.swarm for route in table.routes if route.swarm is not None)
    await asyncio.gather(*(swarm.last_known() for swarm in swarms))
    if not swarms:
        return {}
    first = next(iter(swarms))
    status = first.report.status
    failure = status and status.engine_failure
    engine = first.status().model_dump(include={"engine", "model", "num_repeat", "policy_version"})
    return {**engine, "engine_failure": failure and failure.model_dump()}


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
    def by(name: str, about: str, label: str, counts: Callable[[Stats], Mapping[str, float]]) -> Metric:
        values = {(route, kind): count for route, each in stats.items() for kind, count in counts(each).items()}
        return counter(name, about, values, "route", label)

    def lately(name: str, about: str, total: Callable[[Recent], float]) -> Metric:
        windows = {route: each.recent for route, each in stats.items() if each.recent.groups}
        means = {route: total(window) / window.groups for route, window in windows.items()}
        return gauge(name, f"{about} over the latest {RECENT_GROUPS} judged groups of the route", means, "route")

    yield by("gateway_answers", "Answers by how they were chosen", "chosen", lambda route: route.answers)
    trained = {name: route.groups.trained for name, route in stats.items()}
    yield counter("gateway_trained_groups", "Groups that the swarm server acknowledged", trained, "route")
    yield by("gateway_dropped_groups", "Groups that were not trained", "reason", lambda route: route.groups.dropped)
    yield by(
        "gateway_submitted_groups",
        "Groups by whether their rewards differ",
        "informative",
        lambda route: {"true": route.groups.informative, "false": route.groups.uninformative},
    )
    share = "Share (0 to 1) of groups whose rewards differ,"
    yield lately("gateway_informative_group_share", share, lambda window: window.with_signal)
    mean = "Mean reward of all answers, in the hook's own units,"
    yield lately("gateway_reward_mean", mean, lambda window: window.reward)
    spread = "Standard deviation of the rewards within a group, its mean"
    yield lately("gateway_reward_spread", spread, lambda window: window.spread)
    yield by(
        "gateway_tokens",
        "Completion tokens of groups: delivered, or wasted on answers that nobody got",
        "fate",
        lambda route: dict(route.tokens),
    )
    yield by(
        "gateway_prompt_tokens",
        "Prompt tokens of groups, once each: computed, or cached by the engine; without engines that do not tell",
        "source",
        lambda route: dict(route.prompts),
    )
    malformed = {name: route.malformed_calls for name, route in stats.items()}
    yield counter("gateway_malformed_calls", "Tool calls whose arguments are no JSON object", malformed, "route")
    passed = "Requests answered once by a rule of pass_through"
    yield by("gateway_passed", passed, "rule", lambda route: route.passed_through)
    failures = "Hook calls without a result, by kind"
    yield by("gateway_hook_failures", failures, "code", lambda route: route.hook_failures)
    withheld = "Requests and groups neither kept nor trained for private data"
    yield by("gateway_withheld", withheld, "where", lambda route: route.withheld)
    fallbacks = "Requests that were not answered by the swarm's group"
    yield by("gateway_fallbacks", fallbacks, "reason", lambda route: route.fallbacks)
    shadows = "Requests that an incumbent answered, by the challenger's group"
    yield by("gateway_shadows", shadows, "outcome", lambda route: route.shadows)


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
        (route.name, state.value): float(state is route.upstream.breaker.state)
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
    counts = gateway.sessions.status()
    yield gauge("gateway_sessions", "Open conversations", counts.open)
    yield gauge("gateway_session_bytes", "Of their requests and answers", counts.bytes)
    yield counter("gateway_linked_requests", "Requests that continue an answer, by what says so", counts.linked, "kind")
    yield counter("gateway_ended_sessions", "By why they ended", counts.ended, "kind")
    yield counter("gateway_signals", "What was observed of answers", counts.signals, "kind")
    yield counter("gateway_feedback", "Feedback that counts, or came too late to train", counts.feedback, "kind")
    yield counter(
        "gateway_session_hook_failures", "Session hooks without a result, by code", counts.hook_failures, "kind"
    )
    rewards = {"credited": counts.credited, "dropped": counts.credit_dropped}
    yield counter("gateway_session_rewards", "Rewards of turns by session hooks, by their fate", rewards, "fate")
