"""The owner of one call: the episodes that it is counted and recorded for, or nobody.

Invariant: a call in flight keeps all its episodes alive. It ends with the first of them that is over, unless its caller
asked to have the answer all the same, untrained. A call without an owner leaves no trace.
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
from swarm.server.episodes.endings import DELETED
from swarm.server.episodes.episode import Episode
from swarm.states import EngineState
from swarm.tokens import ModelCall

T = TypeVar("T")

#: ``retry-after`` while the engine sleeps, in seconds
_ASLEEP_SECONDS = 5.0


class CallOwner:
    """What a call needs from its owner; a context manager for as long as the call is in flight.

    Attributes:
        episodes: in the order of the call's choices; may be empty.
        episode_type: of the episodes; ``None`` without any.
    """

    def __init__(self, controller: Controller, episodes: Sequence[Episode] = ()) -> None:
        self.controller = controller
        self.episodes = episodes
        self.episode_type: EpisodeType | None = episodes[0].episode_type if episodes else None

    @property
    def members(self) -> Sequence[object]:
        """What stays on the replica that the call goes to."""
        return self.episodes or (self,)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def check(self) -> None:
        """Raise the reason if the call cannot be made."""

    def record(self, calls: Mapping[int, ModelCall]) -> None:
        """Keep what was sampled, by the index of the choice."""

    def quarantine(self, choice: int, problem: TokenTruthError) -> None:
        """Never train the episode of this choice, unless it is over anyway."""

    def quarantine_all(self, problem: TokenTruthError) -> None:
        """Train none of the episodes."""

    async def synced(self) -> None:
        """Return when what was recorded is on disk; raises :class:`UnavailableError` if it is not in time."""

    def outlive(self) -> None:
        """From now on the call continues, untrained, when the engine's next phase deletes its episodes."""

    async def while_open(self, work: Coroutine[Any, Any, T], engine_gone: Once) -> T:
        """The result of ``work``, which is cancelled when an episode ends (but see :meth:`outlive`) or the engine that
        serves it is gone.

        Raises:
            SwarmGatewayError: why the episode is over, or that no engine serves.
        """
        with Interruptible() as working:

            def closed() -> None:
                if (error := self._why_closed()) is not None:
                    working.interrupt(error)

            def gone() -> None:
                # a moment later the pool knows too, and has the better error for an episode that ends with the engine
                asyncio.get_running_loop().call_soon(lambda: working.interrupt(self._why_gone()))

            for episode in self.episodes:
                episode.over.tell(closed)
            engine_gone.tell(gone)
            try:
                return await work
            finally:
                engine_gone.forget(gone)
                for episode in self.episodes:
                    episode.over.forget(closed)

    def _why_closed(self) -> SwarmGatewayError | None:
        """The error of an episode that ends the call, if there is one."""
        return None

    def _why_gone(self) -> SwarmGatewayError:
        try:
            self.check()
            serving = self.controller.serving
        except SwarmGatewayError as exc:
            return exc
        # the next engine is up already
        return UnavailableError(
            f"the engine was started again while it served the call (policy version {serving.policy_version} now)",
            code="engine_offline",
            retry_after=1.0,
        )


class Unrecorded(CallOwner):
    """The owner of a call that is for no episode: never recorded, never trained."""

    def check(self) -> None:
        """Raise :class:`UnavailableError` if no engine serves, or if it sleeps while it trains."""
        controller = self.controller
        if not controller.serving.stays_awake and controller.state is EngineState.WEIGHT_SYNCING:
            raise UnavailableError(
                "the engine trains and does not serve meanwhile", code="engine_syncing", retry_after=_ASLEEP_SECONDS
            )


class EpisodeCall(CallOwner):
    """The episodes of one call, in the order of its choices.

    Args:
        controller: has their pool.
        episodes: one, or all of a group.
    """

    def __init__(self, controller: Controller, episodes: Sequence[Episode]) -> None:
        super().__init__(controller, episodes)
        self._pool = controller.pool
        self._recorded: list[tuple[Episode, ModelCall]] = []
        self._outlives = False
        self._counted: Collection | None = None

    def __enter__(self) -> Self:
        self._counted = self._pool.begin_call(self.episodes)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._counted is not None, "entered before"
        self._pool.end_call(self.episodes, self._counted)
        self.controller.pool_changed()

    def record(self, calls: Mapping[int, ModelCall]) -> None:
        recorded = [(self.episodes[choice], call) for choice, call in calls.items()]
        self._pool.record(recorded)
        self._recorded += recorded

    def quarantine(self, choice: int, problem: TokenTruthError) -> None:
        episode = self.episodes[choice]
        # the first reason stays
        if not episode.quarantine_reason and not episode.over.happened:
            self._pool.quarantine(episode, problem.message)

    def quarantine_all(self, problem: TokenTruthError) -> None:
        for choice in range(len(self.episodes)):
            self.quarantine(choice, problem)

    async def synced(self) -> None:
        await self.controller.synced()
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

    def _why_closed(self) -> SwarmGatewayError | None:
        for episode in self.episodes:
            error = episode.over_error
            # a call that outlives its episodes continues: its reader has seen the beginning of the answer
            if episode.over.happened and not (self._outlives and error is not None and error.code == DELETED):
                return self._over_error(episode)
        return None

    def _over_error(self, episode: Episode) -> SwarmGatewayError:
        error = episode.over_error or UnavailableError("the episode is over")
        if len(self.episodes) == 1:
            return error
        message = f"episode {episode.episode_uuid} of the group is over, so its group is not sampled: {error.message}"
        if isinstance(error, UnavailableError):
            return UnavailableError(message, code=error.code, retry_after=error.retry_after or 5.0)
        return ConflictError(message, code=error.code)
