"""The pool: which episodes run, who runs them, what they recorded, and how they end.

Invariant: an episode changes state only through :mod:`swarm.states`, and each change is told to the journal in the same
turn of the event loop; every train episode that ends with a result is counted as finished, quarantined or dropped
exactly once. Nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, ValuesView
from functools import partial
from typing import Any

from swarm.errors import ConflictError, SwarmGatewayError, UnavailableError
from swarm.job import TrainJob
from swarm.protocol import NO_EPISODES, POST_ROLLING, EpisodeEnd, PoolInformation
from swarm.server.batching import Collection
from swarm.server.batching.batches import Batches
from swarm.server.episodes.endings import (
    DELETED,
    TOO_LATE,
    Ending,
    Endings,
    check_unique,
    earlier_end,
    unknown_error,
)
from swarm.server.episodes.episode import ClaimWish, Episode, EpisodeGroup, Grant, Refusal
from swarm.server.episodes.running import RunningEpisodes
from swarm.server.episodes.trajectories import trajectory_of
from swarm.server.journal.journal_batch import Together
from swarm.server.journal.records import (
    CallRecorded,
    EndedHow,
    EpisodeEnded,
    EpisodeQuarantined,
    Recovered,
)
from swarm.states import EngineState, EpisodeEvent, next_episode
from swarm.tokens import ModelCall, Trajectory

logger = logging.getLogger(__name__)

#: what calls in flight are told
_ENDED = partial(ConflictError, "the episode has ended", code="episode_ended")
_ABORTED = partial(ConflictError, "the episode was aborted by its client", code="episode_aborted")
_GAVE_WAY = partial(ConflictError, "the episode was on standby and had to give way", code="episode_aborted")


class EpisodePool:
    """Episodes of one server, under one job at a time.

    Args:
        job: sizes and the collection method come from it.
        append: takes records (:mod:`swarm.server.journal.records`) for the journal; never blocks.
        client_timeout: seconds without a sign of life after which nobody waits for a client.
        clock: seconds, monotonic.
        wall: Unix seconds, for records.
    """

    def __init__(
        self,
        job: TrainJob,
        append: Callable[..., None],
        client_timeout: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._job = job
        #: what is held by it goes to the journal together
        self.journal = Together(append)
        self._clock = clock
        self._wall = wall
        self._engine = EngineState.OFFLINE
        self._running = RunningEpisodes()
        #: claimed in advance and not called yet, oldest first; the collection does not know of them, for they are no
        #: work that anybody waits for. A restart takes them for running ones
        self._standby: dict[Episode, None] = {}
        self._endings = Endings()
        self.batches = Batches(job, self.journal, client_timeout, clock)

    @property
    def collection(self) -> Collection:
        """Finished episodes and clients, under the current job."""
        return self.batches.collection

    # ------------------------------------------------------------------ runs and the engine

    def enter(self, engine: EngineState) -> None:
        """Follow the engine to state ``engine``; a weight sync deletes what still runs."""
        self._engine = engine
        self.collection.follow(engine is EngineState.ROLLING)
        if engine is EngineState.ROLLING_POST:
            self._relieve(len(self._standby))
        if engine is EngineState.WEIGHT_SYNCING:
            self._release("the batch left without the episode")

    def begin_run(self, job: TrainJob, reason: str) -> int:
        """Another run, under ``job``: what waits is dropped, what runs is released; how many episodes were dropped."""
        self._release(reason)
        anew, self._job = job != self._job, job
        return self.batches.begin_run(job, reason, anew=anew)

    def continue_run(self, job: TrainJob) -> None:
        """Go on under ``job``, which must collect exactly as the one before."""
        self._job = job

    def restore(self, recovered: Recovered, episodes: Iterable[Episode], groups: Iterable[EpisodeGroup]) -> None:
        """Fill an empty pool after a restart; ``episodes`` are the claimed ones in the order of their claims."""
        self._endings.restore(recovered.endings)
        self._running.add(episodes, groups)
        for episode in self._running.values():
            self.collection.claimed(episode.client_uuid, episode.episode_type, episode.claim.task_hint)
        self.batches.restore(recovered)

    # ------------------------------------------------------------------ claims

    @property
    def running(self) -> int:
        """How many episodes are claimed now."""
        return len(self._running)

    @property
    def episodes(self) -> ValuesView[Episode]:
        """The episodes that are claimed now, oldest claim first."""
        return self._running.values()

    def claim(self, wish: ClaimWish) -> Grant | Refusal:
        """Give out all the episodes of ``wish``, or none."""
        slots = self._job.slots
        if wish.episodes > slots:
            return Refusal(f"{wish.episodes} episodes cannot run at once: there are {slots} slots", False)
        if self._engine is not EngineState.ROLLING:
            return Refusal("")
        collection = self.batches.collection
        if collection.ready:
            # it is about to leave: what began now would be cut off by the weight sync
            return Refusal(POST_ROLLING)
        if wish.standby:
            if not collection.has_room(len(self._standby) + wish.episodes):
                return Refusal(NO_EPISODES)
        elif self._standby:
            self._relieve(wish.episodes - (slots - len(self._running)))
            if not collection.has_room(len(self._standby) + wish.episodes):
                self._relieve(len(self._standby))
        if slots - len(self._running) < wish.episodes:
            return Refusal(NO_EPISODES)
        admission = collection.admit(wish.client_uuid, wish.episode_type, wish.episodes, wish.throttle)
        self.batches.drop(admission.dropped)
        if admission.reason:
            # with the phrase, without which AgentJet's client pauses for 15 s
            return Refusal(f"{NO_EPISODES} {admission.reason}", holds_place=False)
        grant, records = self._running.begin(wish, self._engine, self._clock(), self._wall())
        self.journal(*records)
        if wish.standby:
            begun = (self._running.get(claim.episode_uuid) for claim in grant.claims)
            self._standby.update((episode, None) for episode in begun if episode is not None)
        else:
            collection.claimed(wish.client_uuid, wish.episode_type, wish.task_hint, wish.episodes)
        return grant

    def grant_again(self, episode_uuids: Sequence[str], *, as_group: bool) -> Grant:
        """What an earlier claim got, with keys that open what of it still runs."""
        grant, records = self._running.grant_again(episode_uuids, as_group=as_group)
        self.journal(*records)
        return grant

    # ------------------------------------------------------------------ calls

    def open(self, episode_uuid: str, key: str) -> Episode:
        """The running episode that ``key`` opens; that is a sign of life, also if no engine serves the call then.

        Raises:
            AuthenticationError: no such episode, a wrong key, or the episode is over.
        """
        episode = self._running.open(episode_uuid, key)
        episode.last_active = self._clock()
        self._wake(episode)
        return episode

    def open_group(self, group_uuid: str, key: str) -> EpisodeGroup:
        """The running group that ``key`` opens; all its episodes run, and show a sign of life.

        Raises:
            AuthenticationError: no such group, a wrong key, or one of its episodes is over.
        """
        group = self._running.open_group(group_uuid, key)
        now = self._clock()
        for episode in group.members:
            episode.last_active = now
        self._wake(group.members[0])
        return group

    def begin_call(self, episodes: Sequence[Episode]) -> Collection:
        """An LLM call of a client starts, for one of its episodes or several; it keeps them from being idle until
        :meth:`end_call`, which is to be given what this returns."""
        now = self._clock()
        for episode in episodes:
            episode.in_flight += 1
            episode.last_active = now
        self.collection.begin_call(episodes[0].client_uuid)
        return self.collection

    def end_call(self, episodes: Sequence[Episode], counted: Collection) -> None:
        """An LLM call is over, whatever came of it; ``counted`` may be of the run before."""
        now = self._clock()
        for episode in episodes:
            episode.in_flight -= 1
            episode.last_active = now
        counted.end_call(episodes[0].client_uuid)

    def record(self, calls: Iterable[tuple[Episode, ModelCall]]) -> None:
        """Tell the journal, at once, what a completed call sampled for each episode that is not over; it counts from
        :meth:`keep` on.

        Should the episode end before, nothing of it is trained.
        """
        records = [CallRecorded(one.episode_uuid, call) for one, call in calls if not one.over.happened]
        if records:
            self.journal(*records)

    def keep(self, episode: Episode, call: ModelCall) -> None:
        """What :meth:`record` was told is on disk: it belongs to the episode, unless that is over."""
        if not episode.over.happened:
            episode.calls.append(call)

    def quarantine(self, episode: Episode, reason: str) -> None:
        """Never train this episode; the first reason stays."""
        if not episode.quarantine_reason and not episode.over.happened:
            logger.warning("episode %s is quarantined: %s", episode.episode_uuid, reason)
            episode.quarantine_reason = reason
            self.journal(EpisodeQuarantined(episode.episode_uuid, reason))

    # ------------------------------------------------------------------ ends

    def remembers(self, episode_uuid: str) -> bool:
        """Whether the episode runs or its end is in memory."""
        return self.is_running(episode_uuid) or self._endings.get(episode_uuid) is not None

    def end(
        self,
        client_uuid: str,
        task_id: str,
        ends: Sequence[EpisodeEnd],
        *,
        as_group: bool = False,
        end_key: str = "",
        past: Mapping[str, Ending] | None = None,
    ) -> str:
        """End episodes of one task, all or none; a repetition is answered like the first time.

        With ``as_group`` one episode that cannot be trained drops all of ``ends``. ``past`` holds ends that memory has
        forgotten. Returns why episodes were dropped from training, or an empty string.

        Raises:
            NotFoundError: an episode is unknown or another client's.
            ConflictError: an episode was ended otherwise before: by another call (``episode_ended``), or it was
                aborted, timed out, expired or deleted, so its result came too late.
            RequestError: one episode is named twice.
        """
        check_unique(ends)
        fresh: list[tuple[Episode, EpisodeEnd]] = []
        reasons: list[str] = []
        for end in ends:
            episode = self._running.of(client_uuid, end.episode_uuid)
            if episode is not None:
                self._wake(episode)
                fresh.append((episode, end))
            else:
                ending = self._endings.get(end.episode_uuid) or (past or {}).get(end.episode_uuid)
                reasons.append(earlier_end(ending, client_uuid, end.episode_uuid, end_key).drop_reason)
        outcomes = [
            "" if episode.episode_type == "eval" else trajectory_of(episode, task_id, end.workflow_output)
            for episode, end in fresh
        ]
        # of a repetition that overlaps in part, what was dropped the first time drops the rest as well
        failures = [reason for reason in [*reasons, *outcomes] if isinstance(reason, str) and reason]
        with self.journal.hold():
            for (episode, end), outcome in zip(fresh, outcomes, strict=True):
                if episode.episode_type == "eval":
                    self._finish(episode, task_id, end, end_key, "")
                elif isinstance(outcome, str) or (as_group and failures):
                    quarantined = bool(episode.quarantine_reason)
                    self._finish(episode, task_id, end, end_key, outcome if isinstance(outcome, str) else failures[0])
                    self.batches.lose(task_id, quarantined=quarantined, alone=not as_group)
                else:
                    self._finish(episode, task_id, end, end_key, outcome)
                    self.batches.add(client_uuid, outcome)
        return failures[0] if failures else ""

    def abort(
        self, client_uuid: str, episode_uuid: str, reason: str = "", metadata: Mapping[str, Any] | None = None
    ) -> str:
        """Give an episode up; returns a note when there was nothing left to give up.

        Args:
            reason: what the client says of it; it and ``metadata`` are only kept.

        Raises:
            NotFoundError: it is another client's.
        """
        if (episode := self._running.of(client_uuid, episode_uuid)) is not None:
            ended = EpisodeEnded(
                episode_uuid, client_uuid, "aborted", self._wall(), drop_reason=reason, metadata=metadata or {}
            )
            self._free(episode, EpisodeEvent.ABORT, "aborted", _ABORTED, ended)
            return ""
        ending = self._endings.get(episode_uuid)
        if self._running.get(episode_uuid) is not None or (ending is not None and ending.client_uuid != client_uuid):
            raise unknown_error(episode_uuid)
        if ending is not None and ending.how == "ended":
            return "the episode had ended already; its reward stands"
        return ""

    def is_running(self, episode_uuid: str) -> bool:
        """Whether an episode of this name is claimed now."""
        return self._running.get(episode_uuid) is not None

    def can_continue(self, client_uuid: str, episode_uuid: str) -> bool:
        """Whether the episode is still this client's to run."""
        return self._running.of(client_uuid, episode_uuid) is not None

    def next_deadline(self) -> float | None:
        """When, on the pool's clock, the next episode may be due."""
        return self._running.deadlines.next()

    def expire(self) -> int:
        """Take back episodes that were idle for too long or have used up their time; returns how many."""
        now = self._clock()
        due = self._running.deadlines.due(now)
        for episode in due:
            capped = episode.cap <= now
            how: EndedHow = "capped" if capped else "idle"
            code, words = TOO_LATE[how]
            event = EpisodeEvent.CAP if capped else EpisodeEvent.IDLE_TIMEOUT
            self._free(episode, event, how, partial(ConflictError, f"the episode {words}", code=code))
        return len(due)

    @property
    def batch_ready(self) -> bool:
        """Whether there is a batch to train now."""
        return self.collection.ready

    def information(self) -> PoolInformation:
        """Counts of the current run."""
        return PoolInformation(
            batch_size=self._job.batch_size,
            num_repeat=self._job.num_repeat,
            slots=self._job.slots,
            completed_tasks=self.collection.completed_groups,
            completed_episodes=self.collection.episodes,
            running_episodes=self.running,
            quarantined_episodes=self.batches.quarantined,
            dropped_episodes=self.batches.dropped,
            trained_episodes=self.batches.trained,
            tasks=self.collection.tasks(),
        )

    # ------------------------------------------------------------------ inside

    def _finish(self, episode: Episode, task_id: str, end: EpisodeEnd, end_key: str, outcome: Trajectory | str) -> None:
        """End with a result; ``outcome`` is what is to be trained, or why nothing is (empty for eval)."""
        drop_reason = outcome if isinstance(outcome, str) else ""
        if drop_reason:
            logger.warning("episode %s is not trained: %s", episode.episode_uuid, drop_reason)
        ended = EpisodeEnded(
            episode_uuid=episode.episode_uuid,
            client_uuid=episode.client_uuid,
            how="ended",
            ended_at=self._wall(),
            task_id=task_id,
            output=end.workflow_output,
            drop_reason=drop_reason,
            end_key=end_key,
            trajectory=None if isinstance(outcome, str) else outcome,
        )
        event = EpisodeEvent.END_EVAL if episode.episode_type == "eval" else EpisodeEvent.END_TRAIN
        self._free(episode, event, "ended", _ENDED, ended)

    def _free(
        self,
        episode: Episode,
        event: EpisodeEvent,
        how: EndedHow,
        error: Callable[[], SwarmGatewayError],
        ended: EpisodeEnded | None = None,
    ) -> None:
        episode.state = next_episode(episode.state, event, self._engine)
        ended = ended or EpisodeEnded(episode.episode_uuid, episode.client_uuid, how, self._wall())
        self.journal(ended)
        self._running.remove(episode)
        told = ended.drop_reason if how == "ended" else ""
        self._endings.remember(episode.episode_uuid, Ending(episode.client_uuid, how, told, ended.end_key))
        if episode in self._standby:
            del self._standby[episode]
        else:
            self.batches.collection.released(episode.client_uuid, episode.episode_type, episode.claim.task_hint, how)
        episode.finish_calls(error)

    def _wake(self, episode: Episode) -> None:
        """The episode is used: it, and the group that it is of, are on standby no longer."""
        if episode not in self._standby:
            return
        members = episode.group.members if episode.group is not None else (episode,)
        woken = [one for one in members if one in self._standby]
        for one in woken:
            del self._standby[one]
        # claimed together, they are of one client, type and task
        self.collection.claimed(episode.client_uuid, episode.episode_type, episode.claim.task_hint, len(woken))

    def _relieve(self, count: int) -> None:
        """Take back at least ``count`` of the episodes on standby (oldest first, groups whole), or all there are."""
        while count > 0 and self._standby:
            first = next(iter(self._standby))
            for episode in first.group.members if first.group is not None else (first,):
                if episode in self._standby:
                    self._free(episode, EpisodeEvent.ABORT, "aborted", _GAVE_WAY)
                    count -= 1

    def _release(self, reason: str) -> None:
        """Delete what runs, because the engine goes on without it."""
        error = partial(UnavailableError, f"{reason}; claim a new episode", code=DELETED)
        for episode in list(self._running.values()):
            self._free(episode, EpisodeEvent.ENGINE, "engine", error)
