"""What records mean: each changes the state of episodes, of the batch that is out, and the counts of the run.

Invariant: a record that repeats another, or comes after its episode is over, changes nothing. A :class:`Changes` says
in absolute values what the rows become, so writing it twice is writing it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swarm.server.journal.codec import clean, is_of, pack_call, pack_json, pack_trajectory
from swarm.server.journal.incoming import Kind, Row
from swarm.server.journal.records import (
    AgreementsEnded,
    BatchFailed,
    BatchTaken,
    CallRecorded,
    ClientAgreed,
    EpisodeClaimed,
    EpisodeEnded,
    EpisodeKeyAdded,
    EpisodeQuarantined,
    EpisodesDropped,
    GroupLosses,
    Record,
    RunBegun,
    RunStopped,
    StepRecorded,
)
from swarm.server.journal.schema import State
from swarm.tokens import ModelCall

#: episodes that are over and whose repeated claim or end is still told from a new one's
OVER_REMEMBERED = 20_000
_NEW_RUN = "a new run began"
_FINISHED = (State.WAITING, State.OUT)

Rows = list[Row]


@dataclass(slots=True)
class Live:
    """An episode that is claimed, waits for a batch, or is in the one that is out."""

    id: int
    train: bool
    state: State = State.CLAIMED
    quarantined: bool = False
    digests: set[bytes] = field(default_factory=set[bytes])
    call_ids: set[str] = field(default_factory=set[str])
    #: its latest call; unknown if that was recorded before a restart
    call: ModelCall | None = None


@dataclass(slots=True)
class Run:
    """The current run and its counts; ``id`` 0: none has begun."""

    id: int = 0
    run_id: str = ""
    job_yaml: str = ""
    trained: int = 0
    dropped: int = 0
    quarantined: int = 0
    stopped: bool = False

    def row(self) -> Row:
        return (
            self.id,
            self.run_id,
            self.job_yaml,
            self.trained,
            self.dropped,
            self.quarantined,
            self.stopped,
        )


@dataclass(frozen=True, slots=True)
class Move:
    """Ended episodes, by id, that go to ``state`` together."""

    state: State
    ids: list[int]
    batch_id: str = ""
    lost_reason: str = ""
    step: int | None = None


@dataclass(slots=True)
class Changes:
    """What one transaction writes, in the order of the fields. ``losses`` (by task) and ``agreements`` come on top of
    what there was, unless that is ``..._void``."""

    runs: dict[int, Row] = field(default_factory=dict[int, Row])
    #: see :class:`~swarm.server.journal.incoming.Kind`
    rows: Rows = field(default_factory=list[Row])
    quarantines: Rows = field(default_factory=list[Row])
    moves: list[Move] = field(default_factory=list[Move])
    batches: dict[str, Row | None] = field(default_factory=dict[str, Row | None])
    attempts: dict[str, int] = field(default_factory=dict[str, int])
    steps: Rows = field(default_factory=list[Row])
    losses_void: bool = False
    losses: dict[str, Row | None] = field(default_factory=dict[str, Row | None])
    agreements_void: bool = False
    agreements: Rows = field(default_factory=list[Row])
    #: how many of the rows are ends, and what data of them has no bound, in bytes
    ends: int = 0
    size: int = 0

    @property
    def only_rows(self) -> bool:
        return not (
            self.runs
            or self.quarantines
            or self.moves
            or self.batches
            or self.attempts
            or self.steps
            or self.losses_void
            or self.losses
            or self.agreements_void
            or self.agreements
        )


@dataclass(slots=True)
class Ledger:
    """The live part of the journal. The ``last_...`` are the highest numbers given so far."""

    run: Run = field(default_factory=Run)
    live: dict[str, Live] = field(default_factory=dict[str, Live])
    batch_id: str = ""
    batch: dict[str, None] = field(default_factory=dict[str, None])
    last_episode: int = 0
    last_ended: int = 0
    last_call: int = 0
    over: int = 0
    #: the last :data:`OVER_REMEMBERED` that are over, the latest last
    recent: dict[str, None] = field(default_factory=dict[str, None])

    def fold(self, records: Iterable[Record]) -> Changes:
        """Apply ``records`` and return what they change on disk."""
        changes = Changes()
        for record in records:
            self._apply(record, changes)
        return changes

    def _apply(self, record: Record, changes: Changes) -> None:
        match record:
            case EpisodeClaimed():
                self._claim(record, changes)
            case EpisodeEnded():
                self._end(record, changes)
            case CallRecorded():
                self._call(record, changes)
            case EpisodeKeyAdded():
                episode = self._claimed(record.episode_uuid)
                if episode is not None and record.key_digest not in episode.digests:
                    episode.digests.add(record.key_digest)
                    changes.rows.append((Kind.KEY, episode.id, len(episode.digests), record.key_digest))
            case EpisodeQuarantined():
                episode = self._claimed(record.episode_uuid)
                if episode is not None and not episode.quarantined:
                    episode.quarantined = True
                    changes.quarantines.append((clean(record.reason), episode.id))
            case EpisodesDropped():
                self._drop(record.episode_uuids, record.reason, changes)
            case GroupLosses(task_id, lost, version):
                name = clean(task_id)
                changes.losses[name] = (name, lost, version) if lost else None
            case ClientAgreed(client_uuid):
                changes.agreements.append((clean(client_uuid),))
            case AgreementsEnded():
                changes.agreements_void, changes.agreements = True, []
            case BatchTaken():
                self._take(record, changes)
            case BatchFailed():
                if self.batch and record.batch_id == self.batch_id:
                    changes.attempts[record.batch_id] = record.attempts
            case StepRecorded():
                self._step(record, changes)
            case RunBegun():
                self._begin(record, changes)
            case RunStopped():
                if record.run_id == self.run.run_id:
                    self.run.stopped = True
                    self._count(changes)

    def _claimed(self, episode_uuid: str) -> Live | None:
        episode = self.live.get(episode_uuid)
        return episode if episode is not None and episode.state is State.CLAIMED else None

    def _claim(self, record: EpisodeClaimed, changes: Changes) -> None:
        if record.episode_uuid in self.live or record.episode_uuid in self.recent:
            return
        self.last_episode += 1
        train = record.episode_type == "train"
        # the sets by name: a factory that is told their type takes as long as all the rest here
        self.live[record.episode_uuid] = Live(self.last_episode, train, digests=set(), call_ids=set())
        changes.rows.append(
            (
                Kind.CLAIM,
                self.last_episode,
                clean(record.episode_uuid),
                self.run.id,
                record.episode_type,
                clean(record.client_uuid),
                clean(record.claim_key),
                clean(record.task_hint),
                clean(record.group_uuid),
                record.group_size,
                record.key_digest,
                record.idle_timeout,
                record.max_seconds,
                record.claimed_at,
            )
        )

    def _call(self, record: CallRecorded, changes: Changes) -> None:
        episode = self._claimed(record.episode_uuid)
        call = record.call
        if episode is None or call.call_id in episode.call_ids:
            return
        episode.call_ids.add(call.call_id)
        episode.call = call
        self.last_call += 1
        packed = pack_call(call)
        changes.rows.append((Kind.CALL, self.last_call, episode.id, clean(call.call_id), packed))
        changes.size += len(packed)

    def _end(self, record: EpisodeEnded, changes: Changes) -> None:
        episode = self._claimed(record.episode_uuid)
        if episode is None:
            return
        if record.trajectory is not None:
            episode.state = State.WAITING
        elif episode.train and record.how == "ended":
            episode.state = State.DROPPED
            if episode.quarantined:
                self.run.quarantined += 1
            else:
                self.run.dropped += 1
            self._count(changes)
        else:
            episode.state = State.OVER
        # most episodes have one call: its tokens are on disk already, and stay where they are
        keeps_call = False
        packed = None
        if record.trajectory is not None:
            if episode.call is not None and len(episode.call_ids) == 1 and not episode.digests:
                keeps_call = is_of(record.trajectory, episode.call)
            packed = pack_trajectory(record.trajectory, without_tokens=keeps_call)
            changes.size += len(packed)
        else:
            self._over(record.episode_uuid)
        output = _output(record)
        if output is not None:
            changes.size += len(output)
        self.last_ended += 1
        changes.ends += 1
        changes.rows.append(
            (
                Kind.END,
                episode.id,
                episode.state,
                self.last_ended,
                record.how,
                record.ended_at,
                clean(record.task_id),
                record.output.reward if record.output is not None else None,
                output,
                clean(record.drop_reason),
                clean(record.end_key),
                packed,
                bool(episode.call_ids or episode.digests) and not keeps_call,
            )
        )
        episode.call_ids = set()
        episode.digests = set()
        episode.call = None

    def _take(self, record: BatchTaken, changes: Changes) -> None:
        batch = record.batch
        named = [one.episode_uuid for group in batch.groups for one in group.trajectories]
        taken = [uuid for uuid in named if (episode := self.live.get(uuid)) and episode.state in _FINISHED]
        if not taken or batch.batch_id == self.batch_id:
            return
        if self.batch:
            # one batch is out at a time: that a second one was taken means that the first one came back
            self._move(self.batch, State.WAITING, changes)
            changes.batches[self.batch_id] = None
        changes.agreements_void, changes.agreements = True, []
        members = [[group.task_id, [one.episode_uuid for one in group.trajectories]] for group in batch.groups]
        self.batch_id, self.batch = batch.batch_id, dict.fromkeys(taken)
        self._move(taken, State.OUT, changes, batch_id=batch.batch_id)
        changes.batches[batch.batch_id] = (batch.batch_id, pack_json(members), 0)

    def _step(self, record: StepRecorded, changes: Changes) -> None:
        result = record.result
        metrics = pack_json(result.metrics)
        changes.steps.append((self.run.id, clean(result.batch_id), result.step, result.seconds, metrics))
        if not self.batch or result.batch_id != self.batch_id:
            return
        self.run.trained += len(self.batch)
        self._count(changes)
        self._move(self.batch, State.TRAINED, changes, batch_id=result.batch_id, step=result.step)
        self._forget_batch(changes)

    def _drop(self, episode_uuids: Sequence[str], reason: str, changes: Changes) -> None:
        dropped = list(
            dict.fromkeys(uuid for uuid in episode_uuids if uuid in self.live and self.live[uuid].state in _FINISHED)
        )
        if not dropped:
            return
        self.run.dropped += len(dropped)
        self._count(changes)
        was_out = bool(self.batch)
        for uuid in dropped:
            self.batch.pop(uuid, None)
        self._move(dropped, State.DROPPED, changes, lost_reason=clean(reason))
        if was_out and not self.batch:
            self._forget_batch(changes)

    def _begin(self, record: RunBegun, changes: Changes) -> None:
        if self.run.id == 0 or record.run_id != self.run.run_id:
            self._drop([uuid for uuid, one in self.live.items() if one.state is not State.CLAIMED], _NEW_RUN, changes)
            self.run = Run(self.run.id + 1, record.run_id)
            changes.losses_void, changes.losses = True, {}
            changes.agreements_void, changes.agreements = True, []
        self.run.job_yaml = record.job_yaml
        self.run.stopped = False
        self._count(changes)

    def _move(
        self,
        episode_uuids: Iterable[str],
        state: State,
        changes: Changes,
        batch_id: str = "",
        lost_reason: str = "",
        step: int | None = None,
    ) -> None:
        ids: list[int] = []
        for uuid in episode_uuids:
            episode = self.live[uuid]
            episode.state = state
            ids.append(episode.id)
            if state >= State.TRAINED:
                self._over(uuid)
        changes.moves.append(Move(state, ids, batch_id, lost_reason, step))

    def _over(self, episode_uuid: str) -> None:
        del self.live[episode_uuid]
        self.over += 1
        self.recent[episode_uuid] = None
        if len(self.recent) > OVER_REMEMBERED:
            del self.recent[next(iter(self.recent))]

    def _forget_batch(self, changes: Changes) -> None:
        changes.batches[self.batch_id] = None
        self.batch_id, self.batch = "", {}

    def _count(self, changes: Changes) -> None:
        changes.runs[self.run.id] = self.run.row()


def _output(record: EpisodeEnded) -> str | None:
    """The result as JSON; of an episode without one what was said of it, in the same form."""
    output = record.output
    if output is not None:
        if not output.metadata and not output.log_metrics:
            success = "null" if output.is_success is None else "true" if output.is_success else "false"
            # what most say, as the line below would
            return f'{{"reward": {output.reward!r}, "is_success": {success}, "metadata": {{}}, "log_metrics": {{}}}}'
        return pack_json(output.model_dump())
    return pack_json({"reward": None, "metadata": dict(record.metadata)}) if record.metadata else None
