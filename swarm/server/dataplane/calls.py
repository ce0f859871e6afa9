"""The episodes that one call is for: what counts as their call, and what they are told of it.

Invariant: a call in flight keeps all its episodes alive, and ends with the first of them that is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from swarm.errors import ConflictError, SwarmGatewayError, TokenTruthError, UnavailableError
from swarm.server.concurrency import first_of
from swarm.server.controller import Controller
from swarm.server.episodes import Episode
from swarm.types import ModelCall

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Members:
    """The episodes of one call, in the order of its choices; a context manager for as long as the call is in flight.

    Args:
        controller: has their pool.
        episodes: one, or all of a group.
        quarantined: counts by reason each episode that a call of theirs quarantines.
    """

    def __init__(self, controller: Controller, episodes: Sequence[Episode], quarantined: Counter[str]) -> None:
        self.episodes = episodes
        self._controller = controller
        self._pool = controller.pool
        self._quarantined = quarantined

    def __enter__(self) -> Members:
        for episode in self.episodes:
            self._pool.begin_call(episode)
        return self

    def __exit__(self, *_: object) -> None:
        for episode in self.episodes:
            self._pool.end_call(episode)
        self._controller.pool_changed()

    def record(self, choice: int, call: ModelCall) -> None:
        """Keep what was sampled for one of them."""
        self._pool.record(self.episodes[choice], call)

    def quarantine(self, choice: int, problem: TokenTruthError) -> None:
        """Never train one of them, unless it is over anyway; the first reason stays and is counted."""
        episode = self.episodes[choice]
        if not episode.quarantine_reason and not episode.over.is_set():
            self._quarantined[problem.code or "token_truth"] += 1
            self._pool.quarantine(episode, problem.message)

    def quarantine_all(self, problem: TokenTruthError) -> None:
        """Train none of them."""
        for choice in range(len(self.episodes)):
            self.quarantine(choice, problem)

    async def synced(self) -> None:
        """Return when what was recorded is on disk; raises :class:`UnavailableError` if it is not in time."""
        await self._controller.synced()

    def check(self) -> None:
        """Raise why one of them is over, if one is."""
        for episode in self.episodes:
            if episode.over.is_set():
                raise self._over_error(episode)

    async def while_open(self, work: Coroutine[Any, Any, T], engine_gone: asyncio.Event) -> T:
        """The result of ``work``, which is cancelled when an episode ends or the engine that serves it is gone.

        Raises:
            SwarmGatewayError: why the episode is over, or that no engine serves.
        """

        async def closed(episode: Episode) -> T:
            await episode.over.wait()
            raise self._over_error(episode)

        async def gone() -> T:
            await engine_gone.wait()
            # the pool hears of it a moment later, and has the better word for an episode that goes with the engine
            self.check()
            serving = self._controller.serving  # raises, unless the next engine is up already
            raise UnavailableError(
                f"the engine was started again while it served the call (policy version {serving.policy_version} now)",
                code="engine_offline",
                retry_after=1.0,
            )

        return await first_of(work, *map(closed, self.episodes), gone())

    def _over_error(self, episode: Episode) -> SwarmGatewayError:
        error = episode.over_error or UnavailableError("the episode is over")
        if len(self.episodes) == 1:
            return error
        message = f"episode {episode.episode_uuid} of the group is over, so its group is not sampled: {error.message}"
        if isinstance(error, UnavailableError):
            return UnavailableError(message, code=error.code, retry_after=error.retry_after or 5.0)
        return ConflictError(message, code=error.code)
