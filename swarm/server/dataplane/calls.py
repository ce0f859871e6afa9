"""The owner of one call: the episodes that it is counted and recorded for, or none.

Invariant: a call in flight keeps all its episodes alive. It ends with the first of them that is over, unless its caller
asked to have the answer all the same, untrained. A call without episodes leaves no trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

from swarm.errors import ConflictError, SwarmGatewayError, TokenTruthError, UnavailableError
from swarm.protocol import EpisodeType
from swarm.server.batching.collection import Collection
from swarm.server.concurrency import Interruptible, Once
from swarm.server.engine.controller import Controller
from swarm.server.episodes.episode import DELETED, Episode
from swarm.states import EngineState
from swarm.tokens import ModelCall

T = TypeVar("T")

#: ``retry-after`` while the engine sleeps, in seconds
_ASLEEP_SECONDS = 5.0


class CallOwner:
    """The episodes of one call, in the order of its choices; a context manager for as long as the call is in flight.

    Args:
        controller: has their pool.
        episodes: one, or all of a group.
    """

    def __init__(self, controller: Controller, episodes: Sequence[Episode]) -> None:
        self.episodes = episodes
        self._controller = controller
        self._recorded: list[tuple[Episode, ModelCall]] = []
        self._outlives = False
        self._counted: Collection | None = None

    @property
    def episode_type(self) -> EpisodeType | None:
        """The type of the episodes; ``None`` without any."""
        return self.episodes[0].episode_type if self.episodes else None

    def __enter__(self) -> Self:
        if self.episodes:
            self._counted = self._controller.pool.begin_call(self.episodes)
        return self

    def __exit__(self, *_: object) -> None:
        if self._counted is not None:
            self._controller.pool.end_call(self.episodes, self._counted)
            self._controller.pool_changed()

    def check(self) -> None:
        """Raise why one of the episodes is over, if one is."""
        for episode in self.episodes:
            if episode.over.happened:
                raise self._over_error(episode)

    def record(self, calls: Mapping[int, ModelCall]) -> None:
        """Keep what was sampled, by the index of the choice."""
        recorded = [(self.episodes[choice], call) for choice, call in calls.items()]
        self._controller.pool.record(recorded)
        self._recorded += recorded

    def count(self, version: int, tokens: int) -> None:
        """Note a call that is not recorded: the weights that sampled it, and how many tokens."""
        for episode in self.episodes:
            episode.unrecorded.append((version, tokens))

    def quarantine(self, choice: int, problem: TokenTruthError) -> None:
        """Never train the episode of this choice; the first problem is kept."""
        # an eval episode may have several choices
        for episode in self.episodes[choice : choice + 1]:
            if not episode.quarantine_reason and not episode.over.happened:
                self._controller.pool.quarantine(episode, problem.message)

    def quarantine_all(self, problem: TokenTruthError) -> None:
        """Train none of the episodes."""
        for choice in range(len(self.episodes)):
            self.quarantine(choice, problem)

    async def synced(self) -> None:
        """Return when what was recorded is on disk; raises :class:`UnavailableError` if it is not in time."""
        await self._controller.synced()
        recorded, self._recorded = self._recorded, []
        for episode, call in recorded:
            self._controller.pool.keep(episode, call)

    def outlive(self) -> None:
        """From now on the call continues, untrained, when the engine's next phase deletes its episodes."""
        self._outlives = True

    async def while_open(self, work: Coroutine[Any, Any, T], engine_gone: Once) -> T:
        """The result of ``work``, which is cancelled when an episode ends (but see :meth:`outlive`) or the engine that
        serves it is gone.

        Raises:
            SwarmGatewayError: why the episode is over, or that no engine serves.
        """
        with Interruptible() as working:

            def closed() -> None:
                for episode in self.episodes:
                    if episode.over.happened and not self._survives(episode):
                        working.interrupt(self._over_error(episode))
                        return

            def gone() -> None:
                # a moment later the pool knows too, and has the better error for an episode that ends with the engine
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
        """Whether the call continues although the episode is over: the reader has seen the beginning of the answer."""
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


class Unrecorded(CallOwner):
    """A call for no episode: never recorded, never trained."""

    def __init__(self, controller: Controller) -> None:
        super().__init__(controller, ())

    def check(self) -> None:
        """Raise :class:`UnavailableError` if no engine serves, or if it sleeps while it trains."""
        controller = self._controller
        if not controller.serving.stays_awake and controller.state is EngineState.WEIGHT_SYNCING:
            raise UnavailableError(
                "the engine trains and does not serve meanwhile", code="engine_syncing", retry_after=_ASLEEP_SECONDS
            )
