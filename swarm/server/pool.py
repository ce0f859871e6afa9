"""The pool: which episodes exist, who runs them, what they recorded, and what the next batch has of them.

Invariant: an episode changes state only through :mod:`swarm.states`; every train episode that ends is counted as
finished, quarantined or dropped exactly once. Pure logic on one event loop: nothing here waits.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from swarm.errors import AuthenticationError, ConflictError, NotFoundError, RequestError, UnavailableError
from swarm.job import TrainJob
from swarm.protocol import EpisodeEnd, EpisodeType, PoolInformation
from swarm.server.auth.token import digest
from swarm.server.episodes import Claim, Ending, Endings, Episode
from swarm.server.groups import GroupStore
from swarm.states import EngineState, EpisodeEvent, EpisodeState, next_episode
from swarm.tracker.timelines import merge_calls
from swarm.types import ModelCall, TrainBatch, Trajectory

logger = logging.getLogger(__name__)

#: states in which episodes that run may go on sampling
_SERVING = frozenset({EngineState.ROLLING, EngineState.ROLLING_POST})


class EpisodePool:
    """Episodes of one job.

    Args:
        job: sizes come from it: ``batch_size``, ``num_repeat``, ``slots``.
        clock: seconds, monotonic.
    """

    def __init__(self, job: TrainJob, clock: Callable[[], float] = time.monotonic) -> None:
        self._job = job
        self._clock = clock
        self._engine = EngineState.OFFLINE
        self._registered: deque[Episode] = deque(Episode() for _ in range(job.slots))
        self._running: dict[str, Episode] = {}
        self._endings = Endings()
        self._groups = GroupStore(job.batch_size, job.num_repeat)
        self._quarantined = 0
        self._dropped = 0

    # ------------------------------------------------------------------ engine

    def enter(self, engine: EngineState, reason: str = "") -> None:
        """Follow the engine to state ``engine``; leaving the serving states deletes what still runs."""
        self._engine = engine
        if engine not in _SERVING:
            error = UnavailableError(reason or f"the engine is {engine}; claim a new episode", code="episode_deleted")
            for episode in list(self._running.values()):
                self._free(episode, EpisodeEvent.ABORT, Ending(episode.client_uuid, "engine"), error)
        self._refill()

    @property
    def running(self) -> int:
        """How many episodes are claimed now."""
        return len(self._running)

    # ------------------------------------------------------------------ episodes

    def claim(
        self, client_uuid: str, episode_type: EpisodeType, idle_timeout: float, count: int = 1
    ) -> list[Claim] | None:
        """Claim ``count`` episodes, oldest slots first, or none at all.

        ``idle_timeout`` is in seconds without an LLM call, after which the episode is taken back.
        """
        if self._engine is not EngineState.ROLLING or len(self._registered) < count:
            return None
        claims: list[Claim] = []
        for _ in range(count):
            episode = self._registered.popleft()
            episode.state = next_episode(episode.state, EpisodeEvent.CLAIM, self._engine)
            claims.append(episode.hand_out(client_uuid, episode_type, idle_timeout, self._clock()))
            self._running[episode.episode_uuid] = episode
        return claims

    def open(self, episode_uuid: str, key: str) -> Episode:
        """The running episode that ``key`` opens.

        Raises:
            AuthenticationError: no such episode, a wrong key, or the episode is over.
        """
        episode = self._running.get(episode_uuid)
        # an unknown episode costs the same comparison as a known one
        expected = episode.key_digest if episode is not None else b"\0" * 32
        if not hmac.compare_digest(digest(key), expected) or episode is None:
            raise AuthenticationError("wrong or missing episode key, or the episode is over: claim a new episode")
        return episode

    def begin_call(self, episode: Episode) -> None:
        """An LLM call starts; it keeps the episode alive until :meth:`end_call`."""
        episode.in_flight += 1
        episode.last_active = self._clock()

    def end_call(self, episode: Episode) -> None:
        """An LLM call is over, whatever came of it."""
        episode.in_flight -= 1
        episode.last_active = self._clock()

    def record(self, episode: Episode, call: ModelCall) -> None:
        """Keep what a completed call sampled."""
        episode.calls.append(call)

    def quarantine(self, episode: Episode, reason: str) -> None:
        """Never train this episode; the first reason stays."""
        if not episode.quarantine_reason:
            logger.warning("episode %s is quarantined: %s", episode.episode_uuid, reason)
            episode.quarantine_reason = reason

    def end(self, client_uuid: str, task_id: str, ends: Sequence[EpisodeEnd], *, as_group: bool = False) -> str:
        """End episodes of one task, all or none; a repetition is answered like the first time.

        With ``as_group`` one episode that cannot be trained drops all of ``ends``. Returns why episodes were dropped
        from training, or an empty string.

        Raises:
            NotFoundError: an episode is unknown or another client's.
            ConflictError: an episode was aborted, timed out or deleted, so its result came too late.
            RequestError: one episode is named twice.
        """
        if len({end.episode_uuid for end in ends}) != len(ends):
            raise RequestError("an episode is named twice", param="ends")
        fresh: list[tuple[Episode, EpisodeEnd]] = []
        reasons: list[str] = []
        for end in ends:
            episode = self._running.get(end.episode_uuid)
            if episode is not None and episode.client_uuid == client_uuid:
                fresh.append((episode, end))
            else:
                reasons.append(self._earlier_end(client_uuid, end.episode_uuid).drop_reason)
        outcomes = [self._trajectory(episode, task_id, end) for episode, end in fresh]
        # of a repetition that overlaps in part, what was dropped the first time drops the rest as well
        failures = [reason for reason in (*reasons, *(o for o in outcomes if isinstance(o, str))) if reason]
        for (episode, _), outcome in zip(fresh, outcomes, strict=True):
            if episode.episode_type == "eval":
                self._finish(episode, EpisodeEvent.END_EVAL, "")
                continue
            reason = outcome if isinstance(outcome, str) else failures[0] if as_group and failures else ""
            self._finish(episode, EpisodeEvent.END_TRAIN, reason)
            if isinstance(outcome, Trajectory) and not reason:
                self._dropped += self._groups.add(outcome)
                continue
            if episode.quarantine_reason:
                self._quarantined += 1
            else:
                self._dropped += 1
            if not as_group:
                self._dropped += self._groups.lose(task_id)
        self._refill()
        return failures[0] if failures else ""

    def abort(self, client_uuid: str, episode_uuid: str) -> str:
        """Give an episode up; returns a note when there was nothing left to give up.

        Raises:
            NotFoundError: it is another client's.
        """
        episode = self._running.get(episode_uuid)
        if episode is not None and episode.client_uuid == client_uuid:
            error = ConflictError("the episode was aborted by its client", code="episode_aborted")
            self._free(episode, EpisodeEvent.ABORT, Ending(client_uuid, "aborted"), error)
            self._refill()
            return ""
        ending = self._endings.get(episode_uuid)
        if episode is not None or (ending is not None and ending.client_uuid != client_uuid):
            raise _unknown(episode_uuid)
        if ending is not None and ending.how == "ended":
            return "the episode had ended already; its reward stands"
        return ""

    def can_continue(self, client_uuid: str, episode_uuid: str) -> bool:
        """Whether the episode is still this client's to run."""
        episode = self._running.get(episode_uuid)
        return episode is not None and episode.client_uuid == client_uuid

    def next_deadline(self) -> float | None:
        """When, on the pool's clock, the next episode may count as abandoned."""
        deadlines = [d for episode in self._running.values() if (d := episode.idle_deadline()) is not None]
        return min(deadlines, default=None)

    def expire(self) -> int:
        """Take back abandoned episodes; returns how many."""
        now = self._clock()
        expired = [e for e in self._running.values() if (d := e.idle_deadline()) is not None and d <= now]
        for episode in expired:
            message = f"the episode was idle for more than {episode.idle_timeout:g} s (discard_episode_timeout)"
            ending = Ending(episode.client_uuid, "idle")
            self._free(episode, EpisodeEvent.IDLE_TIMEOUT, ending, ConflictError(message, code="episode_timed_out"))
        self._refill()
        return len(expired)

    # ------------------------------------------------------------------ batches

    @property
    def batch_ready(self) -> bool:
        """Whether ``batch_size`` tasks have ``num_repeat`` finished episodes."""
        return self._groups.ready

    def take_batch(self) -> TrainBatch:
        """The next batch; out until :meth:`confirm` or :meth:`give_back`.

        Raises:
            StateError: there is no whole batch, or one is out already.
        """
        return self._groups.take()

    def confirm(self, batch_id: str) -> TrainBatch | None:
        """The batch whose step is done, or ``None`` if that batch is not out."""
        return self._groups.confirm(batch_id)

    def give_back(self) -> int:
        """Take back the batch whose step died; returns how many groups that were."""
        return self._groups.give_back()

    def drop_collected(self) -> int:
        """Drop all finished episodes that no step has trained; returns how many."""
        dropped = self._groups.clear()
        self._dropped += dropped
        return dropped

    def information(self) -> PoolInformation:
        """Counts of the current batch."""
        return PoolInformation(
            batch_size=self._job.batch_size,
            num_repeat=self._job.num_repeat,
            slots=self._job.slots,
            completed_tasks=self._groups.completed_groups,
            completed_episodes=self._groups.episodes,
            running_episodes=self.running,
            quarantined_episodes=self._quarantined,
            dropped_episodes=self._dropped,
            tasks=self._groups.tasks(),
        )

    # ------------------------------------------------------------------ inside

    def _earlier_end(self, client_uuid: str, episode_uuid: str) -> Ending:
        ending = self._endings.get(episode_uuid)
        if ending is None or ending.client_uuid != client_uuid:
            raise _unknown(episode_uuid)
        if ending.how == "ended":
            return ending
        why = {"aborted": "was aborted", "idle": "was idle for too long", "engine": "was deleted with its engine phase"}
        raise ConflictError(
            f"episode {episode_uuid} {why[ending.how]}: its result came too late and is not counted",
            code="episode_over",
        )

    def _trajectory(self, episode: Episode, task_id: str, end: EpisodeEnd) -> Trajectory | str:
        """What is to be trained, or why nothing is (empty for eval episodes)."""
        if episode.episode_type == "eval":
            return ""
        if episode.quarantine_reason:
            return f"quarantined: {episode.quarantine_reason}"
        timelines = merge_calls(episode.calls)
        if not timelines:
            return "no completed LLM call was recorded in the episode"
        try:
            return Trajectory(
                episode_uuid=episode.episode_uuid,
                task_id=task_id,
                reward=end.workflow_output.reward,
                timelines=timelines,
                num_calls=len(episode.calls),
                log_metrics=end.workflow_output.log_metrics,
            )
        except ValidationError as exc:
            return f"invalid trajectory: {exc.errors()[0]['msg']}"

    def _finish(self, episode: Episode, event: EpisodeEvent, drop_reason: str) -> None:
        if drop_reason:
            logger.warning("episode %s is not trained: %s", episode.episode_uuid, drop_reason)
        ending = Ending(episode.client_uuid, "ended", drop_reason)
        self._free(episode, event, ending, ConflictError("the episode has ended", code="episode_over"))

    def _free(
        self, episode: Episode, event: EpisodeEvent, ending: Ending, error: ConflictError | UnavailableError
    ) -> None:
        episode.state = next_episode(episode.state, event, self._engine)
        del self._running[episode.episode_uuid]
        self._endings.remember(episode.episode_uuid, ending)
        episode.finish_calls(error)
        if episode.state is EpisodeState.REGISTERED:
            # the slot is offered again under a new name: a late abort of the old claim must not hit the new one
            self._registered.append(Episode())

    def _refill(self) -> None:
        if self._engine is EngineState.ROLLING:
            while len(self._registered) + len(self._running) < self._job.slots:
                self._registered.append(Episode())


def _unknown(episode_uuid: str) -> NotFoundError:
    return NotFoundError(f"episode {episode_uuid} does not exist or is not yours", code="episode_not_found")
