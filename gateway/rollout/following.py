"""``StageFollower``: a gateway's copy of the stages that one swarm server keeps.

Invariant: the copy is what the server sent last. A route whose stage was never sent is answered by its incumbent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from swarm.client import AsyncSwarmClient
from swarm.concurrency import Signal, backoff, end_tasks
from swarm.errors import StateError, SwarmGatewayError
from swarm.evidence.stages import ServingStage
from swarm.protocol import FollowedRoute

logger = logging.getLogger(__name__)

#: Seconds of one long poll; a change ends it at once.
_POLL_SECONDS = 10.0
#: Pauses of a server that is away, or that does not wait.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0


class StageFollower:
    """The stages that ``client`` reads, once there are ``routes`` to follow, by their names and incumbents."""

    def __init__(self, client: AsyncSwarmClient) -> None:
        self._client = client
        self.routes: dict[tuple[str, str], FollowedRoute] = {}
        self._stages: dict[tuple[str, str], ServingStage] = {}
        self._conflicts: dict[tuple[str, str], str] = {}
        self._changes = 0
        self._following: asyncio.Task[None] | None = None
        #: notified whenever the server has sent them
        self.heard = Signal()

    def follow(self, routes: Iterable[FollowedRoute]) -> None:
        """From now on follow the stages of ``routes`` and of no others; the server learns of the new ones."""
        wanted = {(route.route, route.incumbent): route for route in routes}
        if self.routes == wanted:
            return
        self.routes = wanted
        if self._following is not None:
            self._following.cancel()
            self._following = None
        if wanted:
            self._following = asyncio.create_task(self._follow(), name="following stages")

    def stage(self, route: str, incumbent: str) -> ServingStage | None:
        """The stage of a route; ``None``: the server has not sent it yet."""
        return self._stages.get((route, incumbent))

    def look(self, changes: int, stages: Iterable[ServingStage], *, on_disk: bool) -> None:
        """Take the stages from a status of the server, unless they are older than the copy, or not ``on_disk``. A death
        of the server may undo moves that are not on disk; the long poll brings such a move once it is there."""
        if on_disk and changes >= self._changes > 0:
            # a status is for readers and lacks the salts
            salts = {key: stage.salt for key, stage in self._stages.items()}
            salted = [stage.model_copy(update={"salt": salts[stage.key]}) for stage in stages if stage.key in salts]
            self._take(changes, salted)

    def conflict(self, route: str, incumbent: str) -> str:
        """Why the rules that this gateway has configured for a route are not in force; empty: they are."""
        wanted, stage = self.routes.get((route, incumbent)), self.stage(route, incumbent)
        if wanted is None or stage is None or wanted.rules == stage.rules:
            return ""
        ours, theirs = wanted.rules.model_dump(), stage.rules.model_dump()
        names = ", ".join(name for name in ours if ours[name] != theirs[name])
        return (
            f"the swarm server has other rules ({names}) for the route {route}, by which it goes on: others need a "
            "gateway that begins with a token of the scope admin"
        )

    async def close(self) -> None:
        """Follow no longer."""
        if self._following is not None:
            await end_tasks(self._following)

    async def _follow(self) -> None:
        failures, after, loop = 0, None, asyncio.get_running_loop()
        while True:
            began, changes, stages = loop.time(), self._changes, self._stages
            try:
                answer = await self._client.follow_stages([*self.routes.values()], after, _POLL_SECONDS)
            except StateError:
                return  # the client is closed
            except SwarmGatewayError as exc:
                failures += 1
                logger.debug("the stages cannot be followed: %s", exc)
            else:
                # unless a status that overtook it says more
                if self._changes == changes or answer.changes >= self._changes:
                    self._take(answer.changes, answer.stages)
                quick = loop.time() - began < _POLL_SECONDS / 2
                failures = failures + 1 if quick and after is not None and self._stages == stages else 0
                after = answer.changes
            if failures:
                await asyncio.sleep(backoff(failures, _FIRST_PAUSE, _LONGEST_PAUSE))

    def _take(self, changes: int, stages: Iterable[ServingStage]) -> None:
        self._changes = changes
        self._stages = {stage.key: stage for stage in stages}
        self.heard.notify()
        for route, incumbent in self.routes:
            conflict = self.conflict(route, incumbent)
            if conflict and self._conflicts.get((route, incumbent)) != conflict:
                logger.warning("%s", conflict)
            self._conflicts[route, incumbent] = conflict
