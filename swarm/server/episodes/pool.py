"""The pool: which episodes run, who runs them, what they recorded, and how they end.

Invariant: each decision is appended to the journal, as rows, in the same turn of the event loop; every train episode
that ends with a result is counted as finished, quarantined or dropped exactly once. Nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from swarm.concurrency import Latest
from swarm.credentials import digest
from swarm.errors import AuthenticationError, RequestError, SwarmGatewayError, UnavailableError
from swarm.evidence.alarms import WatchRules
from swarm.evidence.pairs import Pair
from swarm.evidence.stages import JobTerms
from swarm.job import TrainJob
from swarm.protocol import (
    BATCH_WAITS,
    NO_EPISODES,
    POST_ROLLING,
    THROTTLED,
    TRAINED_OUT,
    TRAINER_AWAY,
    TRAINING_WAITS,
    EpisodeEnd,
)
from swarm.server.batching.collection import Collection
from swarm.server.episodes.episode import (
    DELETED,
    ClaimWish,
    Grant,
    LiveEpisode,
    Refusal,
    RunningEpisodes,
    earlier_end,
    is_one_of,
    over_error,
    unknown_error,
)
from swarm.server.episodes.evidence import Comparisons, Evaluations, TrainingWatch
from swarm.server.episodes.stages import Stages
from swarm.server.episodes.timelines import count_tokens
from swarm.server.journal.recovery import MAX_ENDINGS
from swarm.server.journal.rows import CallRow, EndedHow, Ending, EndRow, QuarantineRow, Recovered
from swarm.states import EngineState, EngineStates, EpisodeState, TrainerState, VllmState
from swarm.status import PoolInformation
from swarm.tokens import ModelCall, TokenCounts, Trajectory
from swarm.types import Notes, StepResult

logger = logging.getLogger(__name__)

#: states that end when the next batch opens
_BETWEEN_BATCHES = frozenset({EngineState.ROLLING_POST, EngineState.WEIGHT_SYNCING})


class EpisodePool:
    """Episodes of one server, under one job at a time.

    Args:
        append: takes rows (:mod:`swarm.server.journal.rows`) for the journal; never blocks. Those of one turn of the
            event loop reach the disk together, or none of them.
        client_timeout: seconds without a sign of life after which nobody waits for a client.
        watch: what of the steps raises an alarm; default: see the rules.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        job: TrainJob,
        append: Callable[..., None],
        client_timeout: float = 300.0,
        watch: WatchRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job = job
        self._append = append
        self._clock = clock
        self._engine = EngineStates()
        #: the episodes that are claimed now; only :class:`EpisodePool` ends them
        self.running = RunningEpisodes(append, clock)
        self._endings = Latest[str, Ending](MAX_ENDINGS)
        self._client_timeout = client_timeout
        #: finished episodes and clients, under the current job
        self.collection = self._new_collection("")
        #: who answers the users of the routes behind this server
        self.stages = Stages(append, clock)
        self.stages.job = _terms(job)
        self._watch_rules = watch or WatchRules()
        self._new_evidence("")

    # ------------------------------------------------------------------ runs and the engine

    def follow(self, engine: EngineStates) -> None:
        """Follow the engine; unless episodes always run, a batch that leaves deletes what runs."""
        self._engine = engine
        self.collection.follow(engine.word is EngineState.ROLLING)
        if engine.word is EngineState.WEIGHT_SYNCING and not engine.always:
            self._release("the batch left without the episode")

    def advance(self, policy_version: int) -> None:
        """vLLM serves the weights of this version."""
        self.collection.advance(policy_version)
        if self.stages.serves(policy_version):
            self.comparisons.forget_above(policy_version)
            self.evaluations.forget_above(policy_version)

    def stepped(self, steps: Sequence[StepResult]) -> None:
        """The last of the run's ``steps`` is done: do what the alarms that begin with it say."""
        for alarm in self.watch.look(steps, self.evaluations.results(), self.job):
            if alarm.action == "rollback":
                self.stages.roll_back_all(alarm.sentence)

    @property
    def training_waits(self) -> bool:
        """Whether a batch that is ready stays: for a verdict, or for a person."""
        return self.stages.holds or self.watch.pauses

    def begin_run(self, run_id: str, job: TrainJob, reason: str, from_step: int = 0) -> None:
        """Begin run ``run_id`` under ``job``: drop what waits, release what runs."""
        self._release(reason)
        self.collection.begin_run(run_id, reason)
        self._new_evidence(run_id)
        self.stages.begin_run(run_id, from_step)
        self.stages.job = _terms(job)
        if job != self.job:
            self.job = job
            self.collection = self._new_collection(run_id, self.collection)

    def continue_run(self, job: TrainJob) -> None:
        """Continue under ``job``, which must collect exactly as the one before."""
        self.job = job
        self.stages.job = _terms(job)

    def restore(self, recovered: Recovered) -> None:
        """Fill an empty pool after a restart."""
        self._endings.update(recovered.endings)
        self.running.restore(recovered.claimed)
        for episode in self.running.values():
            self.collection.claimed(episode.client_uuid, episode.episode_type, episode.claim.task_hint)
        self._new_evidence(recovered.run_id)
        self.evaluations.restore(recovered.evaluations)
        self.comparisons.restore(recovered.pairs, recovered.ratings)
        self.stages.restore(recovered.run_id, recovered.stages, max((step.step for step in recovered.steps), default=0))
        self.watch.restore(recovered.resumed, recovered.steps, self.evaluations.results(), self.job)
        self.collection.restore(recovered)

    # ------------------------------------------------------------------ claims

    def claim(self, wish: ClaimWish) -> Grant | Refusal:
        """Grant all episodes of ``wish``, or none."""
        slots = self.job.slots
        if wish.episodes > slots:
            return Refusal(f"{wish.episodes} episodes cannot run at once: there are {slots} slots", False)
        if wish.episode_type == "train" and (reason := self.no_episode_needed):
            return Refusal(reason, holds_place=False, closed=not self._engine.trained_out)
        if self._engine.word is not EngineState.ROLLING:
            return Refusal("", closed=self._engine.word in _BETWEEN_BATCHES)
        collection = self.collection
        if collection.ready and not (self._engine.trained_out or self.training_waits):
            # it is about to leave, and the weight sync would cut off what begins now
            return Refusal(POST_ROLLING, closed=True)
        if slots - len(self.running) < wish.episodes:
            return Refusal(NO_EPISODES)
        if reason := collection.admit(wish.client_uuid, wish.episode_type, wish.episodes, wish.throttle):
            # AgentJet's client pauses for 15 s unless it finds this phrase
            return Refusal(f"{NO_EPISODES} {reason}", holds_place=False, share_full=reason.startswith(THROTTLED))
        grant = self.running.begin(wish, collection.run_id)
        collection.claimed(wish.client_uuid, wish.episode_type, wish.task_hint, wish.episodes)
        return grant

    # ------------------------------------------------------------------ calls

    def open(self, episode_uuid: str, key: str, acts_for: Callable[[str], bool] = lambda _: False) -> LiveEpisode:
        """The running episode that a caller may use; that is a sign of life even if no engine can serve the call.

        Args:
            key: what the caller sent as the episode's key.
            acts_for: whether the caller may act for a client, and so needs no key of its episodes.

        Raises:
            AuthenticationError: there is no such episode, or it is none of the caller's.
            ConflictError: it is the caller's, and over; says how.
        """
        target = self.running.get(episode_uuid) or self._endings.get(episode_uuid)
        # an unknown episode costs the same comparison as a known one
        opens = is_one_of(digest(key), [b"\0" * 32] if target is None else target.keys)
        if target is None or not (opens or acts_for(target.client_uuid)):
            raise AuthenticationError("wrong or missing episode key, or the episode is over: claim a new episode")
        if isinstance(target, Ending):
            raise over_error(target.how, episode_uuid)
        target.last_active = self._clock()
        return target

    def begin_call(self, episodes: Sequence[LiveEpisode]) -> Collection:
        """An LLM call of a client starts, for one of its episodes or several; it keeps them from being idle until
        :meth:`end_call`, which is to be given what this returns."""
        now = self._clock()
        for episode in episodes:
            episode.in_flight += 1
            episode.last_active = now
        self.collection.begin_call(episodes[0].client_uuid)
        return self.collection

    def end_call(self, episodes: Sequence[LiveEpisode], counted: Collection) -> None:
        """An LLM call is over, whatever came of it; ``counted`` may be of the run before."""
        now = self._clock()
        for episode in episodes:
            episode.in_flight -= 1
            episode.last_active = now
        counted.end_call(episodes[0].client_uuid)

    def record(self, calls: Iterable[tuple[LiveEpisode, ModelCall]]) -> None:
        """Append to the journal what a completed call sampled for each episode that is not over.

        It counts from :meth:`keep` on; if the episode ends before, the call is not trained.
        """
        rows = [CallRow(episode.episode_uuid, call) for episode, call in calls if not episode.over.happened]
        if rows:
            self._append(*rows)

    def keep(self, episode: LiveEpisode, call: ModelCall) -> None:
        """The call that :meth:`record` appended is on disk: it belongs to the episode now, unless the episode is
        over."""
        if not episode.over.happened:
            episode.calls.append(call)

    def quarantine(self, episode: LiveEpisode, reason: str) -> None:
        """Never train this episode; the first reason stays."""
        if not episode.quarantine_reason and not episode.over.happened:
            logger.warning("episode %s is quarantined: %s", episode.episode_uuid, reason)
            episode.quarantine_reason = reason
            self._append(QuarantineRow(episode.episode_uuid, reason))

    # ------------------------------------------------------------------ ends

    def remembers(self, episode_uuid: str) -> bool:
        """Whether the episode runs or its end is in memory."""
        return self.running.get(episode_uuid) is not None or self._endings.get(episode_uuid) is not None

    def end(
        self,
        client_uuid: str,
        task_id: str,
        ends: Sequence[EpisodeEnd],
        *,
        as_group: bool = False,
        end_key: str = "",
        past: Mapping[str, Ending] | None = None,
        pair: Pair | None = None,
    ) -> str:
        """End episodes of one task, all or none; a repetition is answered like the first time.

        With ``as_group`` one episode that cannot be trained drops all of ``ends``. ``past`` holds ends that memory has
        forgotten; ``pair`` is recorded with the ends. Returns why episodes were dropped from training, or an empty
        string.

        Raises:
            NotFoundError: an episode is unknown or another client's.
            ConflictError: an episode was ended otherwise before: by another call (``episode_ended``), or it was
                aborted, timed out, expired or deleted, so its result came too late.
            RequestError: one episode is named twice.
        """
        if len({end.episode_uuid for end in ends}) != len(ends):
            raise RequestError("an episode is named twice", param="ends")
        fresh: list[tuple[LiveEpisode, EpisodeEnd]] = []
        reasons: list[str] = []
        for end in ends:
            episode = self.running.of(client_uuid, end.episode_uuid)
            if episode is not None:
                fresh.append((episode, end))
            else:
                ending = self._endings.get(end.episode_uuid) or (past or {}).get(end.episode_uuid)
                reasons.append(earlier_end(ending, client_uuid, end.episode_uuid, end_key).drop_reason)
        outcomes = [
            "" if episode.episode_type == "eval" else episode.trajectory(task_id, end.workflow_output)
            for episode, end in fresh
        ]
        if pair is not None:
            self.comparisons.add(pair)
        # if a repetition overlaps in part, what was dropped the first time drops the rest as well
        failures = [reason for reason in [*reasons, *outcomes] if isinstance(reason, str) and reason]
        for (episode, end), outcome in zip(fresh, outcomes, strict=True):
            if episode.episode_type == "eval":
                self._finish(episode, task_id, end, end_key, "")
            elif isinstance(outcome, str) or (as_group and failures):
                quarantined = bool(episode.quarantine_reason)
                self._finish(episode, task_id, end, end_key, outcome if isinstance(outcome, str) else failures[0])
                self.collection.lose(task_id, quarantined=quarantined, alone=not as_group)
            else:
                self._finish(episode, task_id, end, end_key, outcome)
                self.collection.add(client_uuid, outcome)
        return "; ".join(dict.fromkeys(failures))

    def tokens(self, episode_uuids: Iterable[str]) -> dict[str, TokenCounts]:
        """What became of the tokens of episodes that are over, as far as memory has them."""
        endings = {name: self._endings.get(name) for name in episode_uuids}
        return {name: ending.tokens for name, ending in endings.items() if ending is not None}

    def abort(self, client_uuid: str, episode_uuid: str, reason: str = "", notes: Notes | None = None) -> str:
        """Give an episode up; returns a note when there was nothing left to give up.

        Args:
            reason: the client's own; it and ``notes`` are only stored.

        Raises:
            NotFoundError: it is another client's.
        """
        if (episode := self.running.of(client_uuid, episode_uuid)) is not None:
            self._free(episode, "aborted", drop_reason=reason, notes=notes)
            return ""
        ending = self._endings.get(episode_uuid)
        if self.running.get(episode_uuid) is not None or (ending is not None and ending.client_uuid != client_uuid):
            raise unknown_error(episode_uuid)
        if ending is not None and ending.how == "ended":
            return "the episode had ended already; its reward stands"
        return ""

    def expire(self) -> int:
        """Take back episodes that were idle for too long or have used up their time; returns how many."""
        now = self._clock()
        due = self.running.deadlines.due(now)
        for episode in due:
            self._free(episode, "capped" if episode.cap <= now else "idle")
        return len(due)

    @property
    def no_episode_needed(self) -> str:
        """Why no train episode is needed although vLLM serves; empty where one is needed.

        None is needed while the trainer computes and the episodes that wait and run fill its next batches, while a
        batch waits for a verdict or a person, after the trainer died, and when all steps are done."""
        vllm, trainer, always = self._engine
        if trainer is TrainerState.BOOTING and vllm is not VllmState.DOWN:
            return TRAINER_AWAY
        if self._engine.trained_out:
            return TRAINED_OUT
        if self.collection.ready and self.training_waits:
            return TRAINING_WAITS
        computes = always and trainer in (TrainerState.COMPUTING, TrainerState.DONE)
        return BATCH_WAITS if computes and self.collection.full else ""

    def information(self) -> PoolInformation:
        """Counts of the current run."""
        return PoolInformation(
            batch_size=self.job.batch_size,
            num_repeat=self.job.num_repeat,
            slots=self.job.slots,
            completed_tasks=len(self.collection.groups.whole),
            completed_episodes=self.collection.groups.episodes,
            running_episodes=len(self.running),
            quarantined_episodes=self.collection.quarantined,
            dropped_episodes=self.collection.dropped,
            batched_episodes=len(batch.trajectories) if (batch := self.collection.outstanding) is not None else 0,
            trained_episodes=self.collection.trained,
            tasks=self.collection.groups.tasks(),
            whole_groups=self.collection.method.whole_groups,
            by_agreement=self.collection.method.by_agreement,
        )

    def _finish(
        self, episode: LiveEpisode, task_id: str, end: EpisodeEnd, end_key: str, outcome: Trajectory | str
    ) -> None:
        """End with a result; ``outcome`` is what is to be trained, or why nothing is (empty for eval)."""
        trajectory, drop_reason = (None, outcome) if isinstance(outcome, str) else (outcome, "")
        if drop_reason:
            logger.warning("episode %s is not trained: %s", episode.episode_uuid, drop_reason)
        if episode.episode_type == "eval":
            self.evaluations.add(end.workflow_output, episode.unrecorded)
        # most episodes have one call: its tokens are the trajectory's, and are on disk already
        one_call = trajectory is not None and len(episode.calls) == 1
        self._free(
            episode,
            "ended",
            task_id=task_id,
            output=end.workflow_output,
            drop_reason=drop_reason,
            end_key=end_key,
            trajectory=trajectory,
            kept_call=episode.calls[0].call_id if one_call else "",
        )

    def _free(
        self,
        episode: LiveEpisode,
        how: EndedHow,
        error: Callable[[], SwarmGatewayError] | None = None,
        **details: Any,
    ) -> None:
        """The episode is over; ``error`` is for calls in flight (default: :func:`over_error`), ``details`` are further
        fields of its :class:`EndRow`."""
        self.running.remove(episode)
        trajectory: Trajectory | None = details.get("trajectory")
        tokens = count_tokens(episode.calls, ()) if trajectory is None else trajectory.tokens
        if trajectory is not None:
            state = EpisodeState.FINISHED
        elif how == "ended" and episode.episode_type == "train":
            state = EpisodeState.DROPPED
        else:
            offered_again = how != "engine" and self._engine.word is EngineState.ROLLING
            state = EpisodeState.REGISTERED if offered_again else EpisodeState.DELETED
        row = EndRow(episode.episode_uuid, episode.client_uuid, state, how, time.time(), tokens=tokens, **details)
        self._append(row)
        self._endings[episode.episode_uuid] = Ending(
            episode.client_uuid, how, row.drop_reason, row.end_key, tokens, tuple(episode.keys)
        )
        self.collection.released(episode.client_uuid, episode.episode_type, episode.claim.task_hint, how)
        episode.finish_calls(error or partial(over_error, how, episode.episode_uuid))

    def _release(self, reason: str) -> None:
        """Delete what runs, because the engine continues without it."""
        error = partial(UnavailableError, f"{reason}; claim a new episode", code=DELETED)
        for episode in list(self.running.values()):
            self._free(episode, "engine", error)

    def _new_evidence(self, run_id: str) -> None:
        """What is known of one run: what its eval episodes measured, what pairs prove of its policies, and what is
        wrong with its training."""
        self.evaluations = Evaluations(self._append, self.stages.is_left, run_id)
        self.comparisons = Comparisons(self._append, run_id, self.stages.judged, self.stages.is_left)
        self.watch = TrainingWatch(self._append, self._watch_rules, run_id)

    def _new_collection(self, run_id: str, before: Collection | None = None) -> Collection:
        collection = Collection(self.job, self._client_timeout, self._clock, self._append, run_id, before)
        # a run begins before its engine rolls
        collection.follow(False)
        return collection


def _terms(job: TrainJob) -> JobTerms:
    return JobTerms(job.model_name, job.num_repeat, job.total_training_steps)
