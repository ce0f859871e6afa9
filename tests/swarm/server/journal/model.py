"""A plain reading of what records mean, kept apart from the journal's own: dictionaries and lists, no disk."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.server.journal.records import (
    AgreementsEnded,
    BatchFailed,
    BatchTaken,
    CallRecorded,
    ClaimedEpisode,
    ClientAgreed,
    EpisodeClaimed,
    EpisodeEnded,
    EpisodeKeyAdded,
    EpisodeQuarantined,
    EpisodesDropped,
    GroupLosses,
    OutstandingBatch,
    PastEnding,
    Record,
    Recovered,
    RunBegun,
    RunStopped,
    StepRecorded,
)
from swarm.tokens import ModelCall, TrainBatch, TrainGroup


@dataclass
class Episode:
    claim: EpisodeClaimed
    state: str = "claimed"
    digests: list[bytes] = field(default_factory=list)
    calls: list[ModelCall] = field(default_factory=list)
    quarantine_reason: str = ""
    end: EpisodeEnded | None = None


@dataclass
class Reference:
    run_id: str | None = None
    job_yaml: str = ""
    stopped: bool = False
    episodes: dict[str, Episode] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    batch: TrainBatch | None = None
    attempts: int = 0
    steps: list = field(default_factory=list)
    losses: dict[str, GroupLosses] = field(default_factory=dict)
    agreed: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: {"quarantined": 0, "dropped": 0, "trained": 0})

    def those(self, state: str) -> list[str]:
        """Ended episodes in ``state``, oldest ending first."""
        return [uuid for uuid in self.ended if self.episodes[uuid].state == state]

    def apply(self, record: Record) -> None:
        episode = self.episodes.get(getattr(record, "episode_uuid", ""))
        running = episode if episode is not None and episode.state == "claimed" else None
        match record:
            case RunBegun(run_id, job_yaml):
                if run_id != self.run_id:
                    for uuid in self.those("waiting") + self.those("out"):
                        self.episodes[uuid].state = "dropped"
                    self.batch, self.steps = None, []
                    self.losses, self.agreed = {}, set()
                    self.counts = dict.fromkeys(self.counts, 0)
                self.run_id, self.job_yaml, self.stopped = run_id, job_yaml, False
            case RunStopped(run_id):
                self.stopped = self.stopped or run_id == self.run_id
            case EpisodeClaimed():
                if episode is None:
                    self.episodes[record.episode_uuid] = Episode(record, digests=[record.key_digest])
            case EpisodeKeyAdded() if running:
                if record.key_digest not in running.digests[1:]:
                    running.digests.append(record.key_digest)
            case CallRecorded() if running:
                if record.call.call_id not in [call.call_id for call in running.calls]:
                    running.calls.append(record.call)
            case EpisodeQuarantined() if running:
                running.quarantine_reason = running.quarantine_reason or record.reason
            case EpisodeEnded() if running:
                running.end = record
                self.ended.append(record.episode_uuid)
                if record.trajectory is not None:
                    running.state = "waiting"
                else:
                    running.state = "over"
                    if record.how == "ended" and running.claim.episode_type == "train":
                        self.counts["quarantined" if running.quarantine_reason else "dropped"] += 1
            case EpisodesDropped(uuids):
                for uuid in dict.fromkeys(uuids):
                    if uuid in self.episodes and self.episodes[uuid].state in ("waiting", "out"):
                        self.episodes[uuid].state = "dropped"
                        self.counts["dropped"] += 1
                if not self.those("out"):
                    self.batch = None
            case GroupLosses(task_id, lost):
                self.losses[task_id] = record
                if not lost:
                    del self.losses[task_id]
            case ClientAgreed(client_uuid):
                self.agreed.add(client_uuid)
            case AgreementsEnded():
                self.agreed = set()
            case BatchTaken(batch):
                self.agreed = set()
                self.batch, self.attempts = batch, 0
                for group in batch.groups:
                    for trajectory in group.trajectories:
                        self.episodes[trajectory.episode_uuid].state = "out"
            case BatchFailed(batch_id, attempts):
                if self.batch is not None and self.batch.batch_id == batch_id:
                    self.attempts = attempts
            case StepRecorded(result):
                if result.batch_id not in [step.batch_id for step in self.steps]:
                    self.steps.append(result)
                if self.batch is not None and self.batch.batch_id == result.batch_id:
                    self.counts["trained"] += len(self.those("out"))
                    for uuid in self.those("out"):
                        self.episodes[uuid].state = "trained"
                    self.batch = None
            case _:
                pass

    def recovered(self) -> Recovered:
        out = set(self.those("out"))
        outstanding = None
        if self.batch is not None:
            kept = [
                (group.task_id, [one for one in group.trajectories if one.episode_uuid in out])
                for group in self.batch.groups
            ]
            groups = [TrainGroup(task_id=task_id, trajectories=one) for task_id, one in kept if one]
            outstanding = OutstandingBatch(TrainBatch(batch_id=self.batch.batch_id, groups=groups), self.attempts)
        claims: dict[tuple[str, str], list[str]] = {}
        endings: dict[str, PastEnding] = {}
        for uuid in self.ended:
            claim, end = self.episodes[uuid].claim, self.episodes[uuid].end
            assert end is not None
            endings[uuid] = PastEnding(
                claim.client_uuid, end.how, end.drop_reason, end.end_key, claim.episode_type, end.ended_at
            )
        for uuid, episode in self.episodes.items():
            if episode.claim.claim_key:
                claims.setdefault((episode.claim.client_uuid, episode.claim.claim_key), []).append(uuid)
        finished = [self.episodes[uuid].end for uuid in self.those("waiting")]
        return Recovered(
            run_id=self.run_id or "",
            job_yaml=self.job_yaml,
            stopped=self.stopped,
            claimed=[
                ClaimedEpisode(one.claim, tuple(one.digests), tuple(one.calls), one.quarantine_reason)
                for one in self.episodes.values()
                if one.state == "claimed"
            ],
            finished=[(end.client_uuid, end.trajectory) for end in finished if end and end.trajectory],
            outstanding=outstanding,
            losses=[self.losses[task_id] for task_id in sorted(self.losses)],
            agreed=sorted(self.agreed),
            endings=endings,
            claims=claims,
            steps=list(self.steps),
            **self.counts,
        )
