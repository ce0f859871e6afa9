"""``GET /judged_groups``: the latest groups with their rewards, reasons and, for whoever may export them, tokens.

Invariant: what people said is only for the admin scope; the event loop never waits for the disk.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Query
from starlette.routing import BaseRoute

from swarm.groups import JudgedGroups, Wanted
from swarm.server.auth import ControlRoute
from swarm.server.engine.controller import Controller
from swarm.server.journal.browse import MAX_GROUPS, judged_groups


@dataclass(frozen=True)
class GroupRoutes:
    """``/judged_groups``."""

    journal: Path
    controller: Controller

    def routes(self) -> list[BaseRoute]:
        return [ControlRoute("GET", "/judged_groups", self.judged_groups, "admin", response_model=JudgedGroups)]

    async def judged_groups(
        self,
        group: Annotated[str, Query(max_length=128, description="only the one whose id begins so")] = "",
        words: Annotated[str, Query(max_length=500, description="in its task, hook or reasons")] = "",
        route: Annotated[str, Query(max_length=500, description="name of its route or client")] = "",
        reason: Annotated[str, Query(max_length=500, description="part of a reason")] = "",
        at_least: Annotated[float | None, Query(description="some answer's reward")] = None,
        at_most: Annotated[float | None, Query(description="some answer's reward")] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_GROUPS)] = 20,
        tokens: Annotated[bool, Query(description="with the token ids")] = False,
    ) -> JudgedGroups:
        """The latest groups of train episodes that have ended, and a histogram of the rewards of the latest steps."""
        wanted = Wanted(words=words, route=route, reason=reason, at_least=at_least, at_most=at_most)
        found = await asyncio.to_thread(judged_groups, self.journal, wanted, group, limit, tokens=tokens)
        return found.model_copy(update={"model": self.controller.job.model if self.controller.has_job else ""})
