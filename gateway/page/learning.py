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


class Servers:
    """The latest statuses of swarm servers, by address."""

    def __init__(self) -> None:
        self._answers: dict[str, dict[str, Any]] = {}
        self._statuses: dict[str, ServerStatus] = {}
        self._asked: dict[str, float] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def forget(self) -> None:
        """Ask all servers anew for the next page."""
        self._asked.clear()

    async def learning(self, gateway: Gateway, caller: Caller) -> dict[str, Any]:
        """Each server's steps and evaluations, and each route's hooks and waits; those that the caller's key opens."""
        with gateway.routes.table.held() as table:
            routes = [route for route in table.routes if caller.opens(route.name)]
            swarms = dict.fromkeys(route.swarm for route in routes if route.swarm is not None)
            answers = await asyncio.gather(*(self._ask(swarm) for swarm in swarms))
            controls = {route.swarm.url for route in routes if route.swarm and route.settings.control == "shuffle"}
            return {
                "at": time.time(),
                "servers": [
                    _opened(answer, caller)
                    | {"control": answer["url"] in controls, "learning": self._sentence(answer["url"], controls)}
                    | {"url": without_credentials(answer["url"])}
                    for answer in answers
                ],
                "routes": [_route(route) for route in routes],
                "waits": _waits(gateway, {route.name for route in routes}),
            }

    def _sentence(self, url: str, controls: set[str]) -> str:
        """Whether the run of a server learns, beside the first of the ``controls``."""
        if (status := self._statuses.get(url)) is None:
            return ""
        chance = [rewards_of(self._statuses[other].steps) for other in sorted(controls) if other in self._statuses]
        measured = (status.steps, status.evaluations, status.alarms)
        return learning_of(*measured, control=chance[0] if chance else None)

    async def _ask(self, swarm: Swarm) -> dict[str, Any]:
        async with self._locks[swarm.url]:
            now = time.monotonic()
            if now - self._asked.get(swarm.url, -math.inf) > _AGE:
                self._asked[swarm.url] = now
                answer = self._answers.get(swarm.url, {"at": None, "steps": [], "evaluations": [], "warnings": []})
                try:
                    async with asyncio.timeout(_SECONDS):
                        status = self._statuses[swarm.url] = await swarm.client.status(episodes=0)
                        answer = _learnt(status)
                except TimeoutError:
                    answer = {**answer, "problem": f"the swarm server has not answered within {_SECONDS:g} s"}
                except SwarmGatewayError as exc:
                    answer = {**answer, "problem": exc.message}
                self._answers[swarm.url] = answer
            return {"url": swarm.url, **self._answers[swarm.url]}


def _opened(answer: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """``answer`` with the challengers of the caller's routes alone."""
    own = {
        name: [stage for stage in answer.get(name, ()) if caller.opens(stage["route"])]
        for name in ("stages", "comparisons")
    }
    return {**answer, **own}


def _learnt(status: ServerStatus) -> dict[str, Any]:
    names = {"reward": REWARD, "groups": TASKS, "signal": TASKS_WITH_SIGNAL}
    return {
        "at": time.time(),
        "doing": DOING[status.engine.engine_status],
        "step": status.engine.global_step,
        "model": status.model,
        "problem": status.engine_failure.reason if status.engine_failure is not None else "",
        "warnings": status.warnings[-_MOST_WARNINGS:],
        "steps": [
            {"step": step.step, "error": _error(step.metrics)}
            | {name: step.metrics[metric] for name, metric in names.items() if metric in step.metrics}
            for step in line_of(status.steps)[-_MOST_STEPS:]
        ],
        "evaluations": [
            {"step": evaluation.step, "episodes": evaluation.episodes, "reward": reward}
            for evaluation in finished(status.evaluations)[-_MOST_STEPS:]
            if (reward := evaluation.metrics.get(EVAL_REWARD)) is not None
        ],
        "stages": [
            {"label": stage.label, "next": stage.rules.after(stage.share) if stage.share < 1 else None}
            | stage.model_dump(mode="json", exclude={"rules", "salt"})
            for stage in status.stages
        ],
        "comparisons": [comparison.model_dump(mode="json") for comparison in status.comparisons],
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
        "models": route.all_names,
        "server": route.swarm and without_credentials(route.swarm.url),
        "stage": serve and serve.stage,
        "policy": route.settings.policy,
        "window": route.settings.feedback_window_seconds,
        "requests": stats.requests,
        "trained": stats.groups.trained,
        "dropped": dict(stats.groups.dropped),
        "recent": stats.recent.model_dump(),
        "hook_failures": dict(stats.hook_failures),
        "hook_errors": dict(stats.hook_errors),
    }


def _waits(gateway: Gateway, routes: set[str]) -> dict[str, dict[str, Any]]:
    """How long requests took since the start, in seconds, by route: the median and the 95th percentile."""
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for family in gateway.telemetry.metrics.registry.collect():
        if family.name != "gateway_request_seconds":
            continue
        for sample in family.samples:
            route = sample.labels.get("route", "")
            if sample.name.endswith("_bucket") and route in routes and sample.labels.get("policy"):
                buckets[route][float(sample.labels["le"])] += sample.value
    return {
        route: {
            "requests": int(counts[math.inf]),
            "half": _quantile(counts, 0.5),
            "most": _quantile(counts, 0.95),
        }
        for route, counts in buckets.items()
        if counts[math.inf]
    }


def _quantile(counts: dict[float, float], share: float) -> float:
    """From cumulative counts by upper bound; linear within a bucket, as Prometheus does it."""
    wanted, low, below = share * counts[math.inf], 0.0, 0.0
    for bound in sorted(counts):
        if counts[bound] >= wanted:
            if math.isinf(bound) or counts[bound] == below:
                return low
            return low + (bound - low) * (wanted - below) / (counts[bound] - below)
        low, below = bound, counts[bound]
    return low
