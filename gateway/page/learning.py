"""Whether the model learns, and which policies compete: from the status of each swarm server and the gateway's counts.

Invariant: a server is asked once for all open pages, at most every :data:`_AGE` seconds, and within a deadline; while
it is silent, its last answer stands with its age and with what went wrong.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.observability.scrubbing import without_credentials
from gateway.rollout.server import Swarm
from gateway.routing.table import Route
from gateway.runtime import Gateway
from gateway.types import Caller
from swarm.errors import SwarmGatewayError
from swarm.evidence.learning import finished, learning_of, line_of, rewards_of
from swarm.intervals import student_quantile
from swarm.measures import EVAL_REWARD, REWARD, SPREAD, TASKS, TASKS_WITH_SIGNAL
from swarm.progress import DOING
from swarm.status import ServerStatus

_AGE = 3.0
_SECONDS = 8.0
_MOST_STEPS, _MOST_WARNINGS = 500, 5


@dataclass
class _Server:
    """What is known of a swarm server: ``status`` is of ``at``, in Unix seconds, and ``silence`` says why it is no
    newer."""

    status: ServerStatus | None = None
    at: float | None = None
    silence: str = ""
    asked: float = -math.inf
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Servers:
    """The latest statuses of swarm servers, by address."""

    def __init__(self) -> None:
        self._servers: defaultdict[str, _Server] = defaultdict(_Server)

    def forget(self) -> None:
        """Ask all servers anew for the next page."""
        for server in self._servers.values():
            server.asked = -math.inf

    async def learning(self, gateway: Gateway, caller: Caller) -> dict[str, Any]:
        """Each server's steps and evaluations, and each route's hooks and waits; those that the caller's key opens."""
        with gateway.routes.table.held() as table:
            routes = [route for route in table.routes if caller.opens(route.name)]
            swarms = dict.fromkeys(route.swarm for route in routes if route.swarm is not None)
            servers = await asyncio.gather(*(self._ask(swarm) for swarm in swarms))
            controls = {route.swarm.url for route in routes if route.swarm and route.settings.control == "shuffle"}
            return {
                "at": time.time(),
                "servers": [
                    _learnt(server, caller)
                    | {"control": swarm.url in controls, "learning": self._sentence(server, controls)}
                    | {"url": without_credentials(swarm.url)}
                    for swarm, server in zip(swarms, servers, strict=True)
                ],
                "routes": [_route(route) for route in routes],
                "waits": _waits(gateway, {route.name for route in routes}),
            }

    def _sentence(self, server: _Server, controls: set[str]) -> str:
        """Whether the run of a server learns, beside the first of the ``controls``."""
        if (status := server.status) is None:
            return ""
        others = [self._servers[other].status for other in sorted(controls)]
        chance = [rewards_of(other.steps) for other in others if other is not None]
        return learning_of(status.steps, status.evaluations, status.alarms, control=chance[0] if chance else None)

    async def _ask(self, swarm: Swarm) -> _Server:
        server = self._servers[swarm.url]
        async with server.lock:
            if time.monotonic() - server.asked > _AGE:
                server.asked = time.monotonic()
                try:
                    async with asyncio.timeout(_SECONDS):
                        server.status = await swarm.client.status(episodes=0)
                    server.at, server.silence = time.time(), ""
                except TimeoutError:
                    server.silence = f"the swarm server has not answered within {_SECONDS:g} s"
                except SwarmGatewayError as exc:
                    server.silence = exc.message
        return server


def _learnt(server: _Server, caller: Caller) -> dict[str, Any]:
    """What a page shows of a server, with the challengers of the caller's routes alone."""
    if (status := server.status) is None:
        return {"at": None, "problem": server.silence, "steps": []}
    names = {"reward": REWARD, "groups": TASKS, "signal": TASKS_WITH_SIGNAL}
    failure = status.engine_failure.reason if status.engine_failure is not None else ""
    return {
        "at": server.at,
        "doing": DOING[status.engine.engine_status],
        "step": status.engine.global_step,
        "model": status.model,
        "problem": server.silence or failure,
        "warnings": status.warnings[-_MOST_WARNINGS:],
        "steps": [
            {"step": step.step, "error": _error(step.metrics)}
            | {name: step.metrics[metric] for name, metric in names.items() if metric in step.metrics}
            for step in line_of(status.steps)[-_MOST_STEPS:]
        ],
        "evaluations": [
            {"step": evaluation.step, "reward": reward}
            for evaluation in finished(status.evaluations)[-_MOST_STEPS:]
            if (reward := evaluation.metrics.get(EVAL_REWARD)) is not None
        ],
        "stages": [
            {"label": stage.label, "next": stage.rules.after(stage.share) if stage.share < 1 else None}
            | stage.model_dump(mode="json", exclude={"rules", "salt"})
            for stage in status.stages
            if caller.opens(stage.route)
        ],
        "comparisons": [each.model_dump(mode="json") for each in status.comparisons if caller.opens(each.route)],
    }


def _error(metrics: Mapping[str, float]) -> float | None:
    """Half the 95 % interval of a step's mean reward: t s / sqrt(G) for the deviation s of its rewards, G groups and
    Student's t with G - 1 degrees of freedom, as if the answers of a group were all alike; so it is too wide rather
    than too narrow. ``None``: not known."""
    spread, groups = metrics.get(SPREAD), metrics.get(TASKS, 0.0)
    return None if spread is None or groups < 2 else student_quantile(0.975, groups - 1) * spread / math.sqrt(groups)


def _route(route: Route) -> dict[str, Any]:
    stats, serve = route.stats, route.settings.serve
    return {
        "name": route.name,
        "server": route.swarm and without_credentials(route.swarm.url),
        "stage": serve and serve.stage,
        "requests": stats.requests,
        "trained": stats.groups.trained,
        "recent": stats.recent.model_dump(),
        "hook_failures": dict(stats.hook_failures),
        "hook_errors": dict(stats.hook_errors),
    }


def _waits(gateway: Gateway, routes: set[str]) -> dict[str, dict[str, float]]:
    """How long requests took since the start, in seconds, by route: the median and the 95th percentile."""
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for family in gateway.telemetry.metrics.registry.collect():
        for sample in family.samples if family.name == "gateway_request_seconds" else ():
            route = sample.labels.get("route", "")
            if sample.name.endswith("_bucket") and route in routes and sample.labels.get("policy"):
                buckets[route][float(sample.labels["le"])] += sample.value
    return {
        route: {"half": _quantile(counts, 0.5), "most": _quantile(counts, 0.95)}
        for route, counts in buckets.items()
        if counts[math.inf]
    }


def _quantile(counts: Mapping[float, float], share: float) -> float:
    """From cumulative counts by upper bound; linear within a bucket, as Prometheus does it."""
    wanted, low, below = share * counts[math.inf], 0.0, 0.0
    for bound in sorted(counts):
        if counts[bound] >= wanted:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (counts[bound] - below)
        low, below = bound, counts[bound]
    return low
