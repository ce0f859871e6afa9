"""What the journal is told, and what it tells after a restart; plain values, free of I/O.

Invariant: applying all records of a journal in their order to an empty pool gives the pool as it was. Times are Unix
seconds (``time.time()``), because they must mean something to the next process.

Nobody changes a record. Python does not enforce that for the two that each episode has: making a frozen one takes three
times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from swarm.protocol import EpisodeType
from swarm.tokens import ModelCall, TrainBatch, Trajectory
from swarm.types import StepResult, WorkflowOutput

#: How an episode ended: by its client's result, by its client giving up, by silence, by its wall-clock cap, or with the
#: engine's phase (a batch left without it, or a run that does not continue the one before).
EndedHow = Literal["ended", "aborted", "idle", "capped", "engine"]


@dataclass(frozen=True, slots=True)
class RunBegun:
    """A job was synced or an engine run began; a new ``run_id`` says that what was collected before does not count."""

    run_id: str
    job_yaml: str


@dataclass(frozen=True, slots=True)
class RunStopped:
    """The current run was stopped on purpose or has done all its steps: the next start begins another one, unless its
    job resumes. Undone by the next :class:`RunBegun`, whatever its ``run_id``."""

    run_id: str


@dataclass(slots=True)
class EpisodeClaimed:
    """An episode was given to a client; ``group_uuid`` is empty unless it was claimed in a group."""

    episode_uuid: str
    client_uuid: str
    episode_type: EpisodeType
    key_digest: bytes
    idle_timeout: float
    max_seconds: float
    claimed_at: float
    claim_key: str = ""
    task_hint: str = ""
    group_uuid: str = ""
    group_size: int = 1


@dataclass(frozen=True, slots=True)
class EpisodeKeyAdded:
    """A repeated claim after a restart got one more key for its episode: of the first only the digest was left."""

    episode_uuid: str
    key_digest: bytes


@dataclass(frozen=True, slots=True)
class CallRecorded:
    """A sampling call of a claimed episode is complete."""

    episode_uuid: str
    call: ModelCall


@dataclass(frozen=True, slots=True)
class EpisodeQuarantined:
    """A claimed episode can never be trained."""

    episode_uuid: str
    reason: str


@dataclass(slots=True)
class EpisodeEnded:
    """A claimed episode is over. ``trajectory`` is there if it waits for a batch; else ``drop_reason`` says why a
    train episode that ended with a result does not. Of an aborted one it is its client's own word, if there is any,
    with ``metadata`` beside it."""

    episode_uuid: str
    client_uuid: str
    how: EndedHow
    ended_at: float
    task_id: str = ""
    output: WorkflowOutput | None = None
    drop_reason: str = ""
    end_key: str = ""
    trajectory: Trajectory | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class EpisodesDropped:
    """Finished episodes that waited for a batch never will be trained: stale, evicted, of a broken group, ...

    ``cause`` is the kind of reason, for counters; it is not kept on disk.
    """

    episode_uuids: Sequence[str]
    reason: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class GroupLosses:
    """Of the group that task ``task_id`` has begun, ``lost`` episodes ended without a trajectory; 0: that group is no
    more. ``version`` is the policy version at its begin."""

    task_id: str
    lost: int
    version: int


@dataclass(frozen=True, slots=True)
class ClientAgreed:
    """A client has no more for the next batch; that holds until :class:`BatchTaken`, :class:`AgreementsEnded` or
    another run."""

    client_uuid: str


@dataclass(frozen=True, slots=True)
class AgreementsEnded:
    """No client agrees any more, though no batch was taken."""


@dataclass(frozen=True, slots=True)
class BatchTaken:
    """Finished episodes went into a batch; it is out until :class:`StepRecorded` or :class:`EpisodesDropped`."""

    batch: TrainBatch


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The trainer reported an error while it had this batch; ``attempts`` counts such failures."""

    batch_id: str
    attempts: int


@dataclass(frozen=True, slots=True)
class StepRecorded:
    """A training step is complete: its batch is consumed, in the same transaction."""

    result: StepResult


Record = (
    RunBegun
    | RunStopped
    | EpisodeClaimed
    | EpisodeKeyAdded
    | CallRecorded
    | EpisodeQuarantined
    | EpisodeEnded
    | EpisodesDropped
    | GroupLosses
    | ClientAgreed
    | AgreementsEnded
    | BatchTaken
    | BatchFailed
    | StepRecorded
)


@dataclass(frozen=True, slots=True)
class ClaimedEpisode:
    """A claimed episode as it was: its claim, all digests of its keys, its calls in order."""

    claim: EpisodeClaimed
    key_digests: tuple[bytes, ...]
    calls: tuple[ModelCall, ...]
    quarantine_reason: str


@dataclass(frozen=True, slots=True)
class PastEnding:
    """What is remembered of an episode that is over."""

    client_uuid: str
    how: EndedHow
    drop_reason: str
    end_key: str
    episode_type: EpisodeType
    ended_at: float


@dataclass(frozen=True, slots=True)
class OutstandingBatch:
    """A batch whose step was not recorded; it must be trained again, as it was."""

    batch: TrainBatch
    attempts: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """Everything a server needs to go on; ``finished`` are the trajectories that wait for a batch, oldest first, each
    with its client. ``endings`` are the latest, oldest first; ``agreed`` are the clients that agree to train what
    waits. Counts are of the current run."""

    run_id: str = ""
    job_yaml: str = ""
    stopped: bool = False
    claimed: list[ClaimedEpisode] = field(default_factory=list[ClaimedEpisode])
    finished: list[tuple[str, Trajectory]] = field(default_factory=list[tuple[str, Trajectory]])
    outstanding: OutstandingBatch | None = None
    losses: list[GroupLosses] = field(default_factory=list[GroupLosses])
    agreed: list[str] = field(default_factory=list[str])
    endings: dict[str, PastEnding] = field(default_factory=dict[str, PastEnding])
    claims: dict[tuple[str, str], list[str]] = field(default_factory=dict[tuple[str, str], list[str]])
    steps: list[StepResult] = field(default_factory=list[StepResult])
    quarantined: int = 0
    dropped: int = 0
    trained: int = 0
