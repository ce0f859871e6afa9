"""Whom one call is for: episodes, which it is counted and recorded for, or nobody.

Invariant: a call in flight keeps all its episodes alive, and ends with the first of them that is over, or goes on
untrained where its caller said so; a call for nobody leaves no trace.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from swarm.errors import ConflictError, SwarmGatewayError, TokenTruthError, UnavailableError
from swarm.protocol import EpisodeType
from swarm.server.batching.collection import Collection
from swarm.server.concurrency import Interruptible, Once
from swarm.server.engine.controller import Controller
from swarm.server.episodes.episode import DELETED, Episode
from swarm.states import EngineState
from swarm.tokens import ModelCall

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: what the caller of a sleeping engine is told to wait, in seconds
_ASLEEP_SECONDS = 5.0


class Party(Protocol):
    """Whom a call is for; a context manager for as long as the call is in flight."""

    @property
    def owners(self) -> Sequence[object]:
        """Who stays on the replica that the call goes to."""
        ...

    @property
    def episode_type(self) -> EpisodeType | None:
        """Of its episodes; ``None`` without any."""
        ...

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...

    def record(self, calls: Mapping[int, ModelCall]) -> None:
        """Keep what was sampled, by choice."""
        ...

    def quarantine(self, choice: int, problem: TokenTruthError) -> None:
        """Never train one of them, unless it is over anyway."""
        ...

    def quarantine_all(self, problem: TokenTruthError) -> None:
        """Train none of them."""
        ...

    async def synced(self) -> None:
        """Return when what was recorded is on disk; raises :class:`UnavailableError` if it is not in time."""
        ...

    def check(self) -> None:
        """Raise why the call cannot be made, if it cannot."""
        ...

    def outlive(self) -> None:
        """From now on the call goes on, untrained, when the engine's next phase deletes its episodes."""
        ...

    async def while_open(self, work: Coroutine[Any, Any, T], engine_gone: Once) -> T:
        """The result of ``work``, which is cancelled when an episode ends (but see :meth:`outlive`) or the engine that
        serves it is gone.

        Raises:
            SwarmGatewayError: why the episode is over, or that no engine serves.
        """
        ...


class Nobody:
    """A call that is for no episode: never recorded, never trained."""

    episode_type: EpisodeType | None = None

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.owners: Sequence[object] = (self,)

    def __enter__(self) -> Nobody:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record(self, calls: Mapping[int, ModelCall]) -> None:
        pass

    def quarantine(self, choice: int, problem: TokenTruthError) -> None:
        pass

    def quarantine_all(self, problem: TokenTruthError) -> None:
        pass

    async def synced(self) -> None:
        pass

    def check(self) -> None:
        """Raise :class:`UnavailableError` if no engine serves, or if it sleeps while it trains."""
        controller = self._controller
        if not controller.serving.stays_awake and controller.state is EngineState.WEIGHT_SYNCING:
            raise UnavailableError(
                "the engine trains and does not serve meanwhile", code="engine_syncing", retry_after=_ASLEEP_SECONDS
            )

    def outlive(self) -> None:
        pass

    async def while_open(self, work: Coroutine[Any, Any, T], engine_gone: Once) -> T:
        with Interruptible() as working:

            def gone() -> None:
                error = UnavailableError("the engine went away while it served the call", code="engine_offline")
                working.interrupt(error)

            engine_gone.tell(gone)
            try:
                return await work
            finally:
                engine_gone.forget(gone)


class Members:
    """The episodes of one call, in the order of its choices; a context manager for as long as the call is in flight.

    Args:
        controller: has their pool.
        episodes: one, or all of a group.
        quarantined: counts by reason each episode that a call of theirs quarantines.
    """

    def __init__(self, controller: Controller, episodes: Sequence[Episode], quarantined: Counter[str]) -> None:
        self.episodes = episodes
        self.owners: Sequence[object] = episodes
        self.episode_type: EpisodeType | None = episodes[0].episode_type
        self._controller = controller
        self._pool = controller.pool
        self._quarantined = quarantined
        self._recorded: list[tuple[Episode, ModelCall]] = []
        self._outlives = False
        self._counted: Collection | None = None

    def __enter__(self) -> Members:
        self._counted = self._pool.begin_call(self.episodes)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._counted is not None, "entered before"
        self._pool.end_call(self.episodes, self._counted)
        self._controller.pool_changed()

    def record(self, calls: Mapping[int, ModelCall]) -> None:
        recorded = [(self.episodes[choice], call) for choice, call in calls.items()]
        self._pool.record(recorded)
        self._recorded += recorded

    def quarantine(self, choice: int, problem: TokenTruthError) -> None:
        """The first reason stays and is counted."""
        episode = self.episodes[choice]
        if not episode.quarantine_reason and not episode.over.happened:
            self._quarantined[problem.code or "token_truth"] += 1
            self._pool.quarantine(episode, problem.message)

    def quarantine_all(self, problem: TokenTruthError) -> None:
        for choice in range(len(self.episodes)):
            self.quarantine(choice, problem)

    async def synced(self) -> None:
        await self._controller.synced()
        recorded, self._recorded = self._recorded, []
        for episode, call in recorded:
            self._pool.keep(episode, call)

    def check(self) -> None:
        """Raise why one of them is over, if one is."""
        for episode in self.episodes:
            if episode.over.happened:
                raise self._over_error(episode)

    def outlive(self) -> None:
        self._outlives = True

    async def while_open(self, work: Coroutine[Any, Any, T], engine_gone: Once) -> T:
        with Interruptible() as working:

            def closed() -> None:
                for episode in self.episodes:
                    if episode.over.happened and not self._survives(episode):
                        working.interrupt(self._over_error(episode))
                        return

            def gone() -> None:
                # the pool hears of it a moment later, and has the better word for an episode that goes with the engine
                asyncio.get_running_loop().call_soon(lambda: working.interrupt(self._gone_error()))

            for episode in self.episodes:
                episode.over.tell(closed)
            engine_gone.tell(gone)
            try:
                return await work
            finally:
                engine_gone.forget(gone)
                for episode in self.episodes:
                    episode.over.forget(closed)

    def _survives(self, episode: Episode) -> bool:
        """Whether the call goes on although the episode is over: whoever reads the answer has seen its beginning."""
        return self._outlives and episode.over_error is not None and episode.over_error.code == DELETED

    def _gone_error(self) -> SwarmGatewayError:
        try:
            self.check()
            serving = self._controller.serving
        except SwarmGatewayError as exc:
            return exc
        # the next engine is up already
        return UnavailableError(
            f"the engine was started again while it served the call (policy version {serving.policy_version} now)",
            code="engine_offline",
            retry_after=1.0,
        )

    def _over_error(self, episode: Episode) -> SwarmGatewayError:
        error = episode.over_error or UnavailableError("the episode is over")
        if len(self.episodes) == 1:
            return error
        message = f"episode {episode.episode_uuid} of the group is over, so its group is not sampled: {error.message}"
        if isinstance(error, UnavailableError):
            return UnavailableError(message, code=error.code, retry_after=error.retry_after or 5.0)
        return ConflictError(message, code=error.code)
