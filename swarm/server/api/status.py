"""``GET /status``: everything that a monitor shows, now or once something has changed.

Invariant: the names of episodes are told in full only to callers that may do anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarm.errors import RequestError
from swarm.server.api.agentjet import sees_uuids
from swarm.server.api.responses import answer
from swarm.server.concurrency import ClientGoneError, until_gone
from swarm.server.engine.controller import Controller
from swarm.server.engine.runs import MAX_STEPS
from swarm.server.monitor import EPISODES, Monitor
from swarm.states import EngineState

MAX_WAIT = 60.0
MAX_EPISODES = 10_000


@dataclass(frozen=True)
class StatusRoutes:
    """``/status``."""

    controller: Controller
    monitor: Monitor

    def routes(self) -> list[Route]:
        return [Route("/status", self.status, methods=["GET"])]

    async def status(self, request: Request) -> Response:
        """``?wait_state=ENGINE.ROLLING&wait_seconds=30`` answers once the engine is there (or in one of several states:
        ``wait_state`` may be repeated), goes OFFLINE, or time is up; ``?after_change=7&wait_seconds=30`` once
        ``engine_changes`` is another number. ``?steps=10`` limits the history, ``?episodes=10`` the running episodes
        that are told of."""
        query = request.query_params
        try:
            states = [EngineState(state) for state in query.getlist("wait_state")]
            after = int(query["after_change"]) if "after_change" in query else None
            seconds = float(query.get("wait_seconds", "0"))
        except ValueError as exc:
            raise RequestError(f"/status: {exc}") from exc
        if not 0 <= seconds <= MAX_WAIT:
            raise RequestError(f"/status: wait_seconds is at most {MAX_WAIT:g}", param="wait_seconds")
        steps = _count(query, "steps", MAX_STEPS, MAX_STEPS)
        episodes = _count(query, "episodes", EPISODES, MAX_EPISODES)
        waiting = None
        if states and seconds:
            waiting = self.controller.wait_for_state(states, seconds)
        elif after is not None and seconds:
            waiting = self.controller.wait_for_change(after, seconds)
        if waiting is not None:
            try:
                await until_gone(request.receive, waiting)
            except ClientGoneError:
                return Response(status_code=499)
        return answer(self.monitor.status(steps=steps, episodes=episodes, whole_uuids=sees_uuids(request)))


def _count(query: QueryParams, name: str, default: int, most: int) -> int:
    try:
        count = int(query.get(name, default))
    except ValueError as exc:
        raise RequestError(f"/status: {name}: {exc}", param=name) from exc
    if not 0 <= count <= most:
        raise RequestError(f"/status: {name} is at most {most}", param=name)
    return count
