"""The rows that the server writes for its decisions, and the values that it reads back after a restart; without I/O.

Invariant: a row states its outcome in absolute values, so the journal stores it without deciding anything, and storing
it twice equals storing it once. Times are Unix seconds (``time.time()``), which mean something to the next process too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec import Struct

from swarm.protocol import EpisodeType
from swarm.states import EpisodeState
from swarm.subjects import Tombstone
from swarm.tokens import ModelCall, TokenCounts, TrainBatch, Trajectory
from swarm.types import Notes, StepResult, WorkflowOutput

#: How an episode ended: with its client's result, because its client gave up, by its idle timeout, by its wall-clock
#: cap, or with the engine's phase (a batch left without it, or a run began that does not continue the one before).
EndedHow = Literal["ended", "aborted", "idle", "capped", "engine"]


class JournalRow(Struct, frozen=True, gc=False):
    """A row is made for each event of each episode: dataclasses would take longer."""


class RunRow(JournalRow, frozen=True, gc=False):
    """A training run; once it is ``stopped`` or has done all steps, the next start begins another unless it resumes."""

    run_id: str
    job_yaml: str
    stopped: bool = False


class CountsRow(JournalRow, frozen=True, gc=False):
    """How many episodes of a run were trained, dropped and quarantined so far."""

    run_id: str
    trained: int
    dropped: int
    quarantined: int


class EpisodeRow(JournalRow, frozen=True, gc=False):
    """An episode that was given to a client; ``group_uuid`` is empty unless it was claimed as part of a group."""

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
    run_id: str = ""


class KeyRow(JournalRow, frozen=True, gc=False):
    """A further key of an episode, for a claim repeated after a restart: of the first key only the digest was left."""

    episode_uuid: str
    key_digest: bytes


class CallRow(JournalRow, frozen=True, gc=False):
    """A completed sampling call of a claimed episode."""

    episode_uuid: str
    call: ModelCall


class QuarantineRow(JournalRow, frozen=True, gc=False):
    """Why a claimed episode can never be trained."""

    episode_uuid: str
    reason: str


class EndRow(JournalRow, frozen=True, gc=False):
    """The end of a claimed episode, and the state that it is in now.

    ``trajectory`` is set if it waits for a batch; otherwise ``drop_reason`` says why a train episode that ended with a
    result does not. For an aborted one, ``drop_reason`` and ``notes`` are the client's own. ``kept_call`` names the
    call whose tokens are the trajectory's; all other calls of the episode are deleted.
    """

    episode_uuid: str
    client_uuid: str
    state: EpisodeState
    how: EndedHow
    ended_at: float
    task_id: str = ""
    output: WorkflowOutput | None = None
    drop_reason: str = ""
    end_key: str = ""
    trajectory: Trajectory | None = None
    notes: Notes | None = None
    kept_call: str = ""
    tokens: TokenCounts = TokenCounts()


class StateRow(JournalRow, frozen=True, gc=False):
    """A later state of ended episodes: in a batch, trained (at ``step``), or dropped (for ``reason``).

    ``cause``, the kind of reason, and ``tokens``, how many were sampled of what is trained or dropped, are for counters
    and are not stored. ``None`` leaves a column as it is.
    """

    episode_uuids: Sequence[str]
    state: EpisodeState
    batch_id: str | None = None
    step: int | None = None
    reason: str | None = None
    cause: str = ""
    tokens: int = 0


class GroupRow(JournalRow, frozen=True, gc=False):
    """``lost`` episodes of the incomplete group of ``task_id`` ended without a trajectory; 0: the group is gone.

    ``version`` is the policy version when the group began.
    """

    task_id: str
    lost: int
    version: int


class AgreementRow(JournalRow, frozen=True, gc=False):
    """A client has no more episodes for the next batch."""

    client_uuid: str


class NoAgreementsRow(JournalRow, frozen=True, gc=False):
    """No client agrees any more: the next batch is agreed on anew."""


class BatchRow(JournalRow, frozen=True, gc=False):
    """The batch that is out, and how often the trainer failed on it."""

    batch: TrainBatch
    attempts: int = 0


class StepRow(JournalRow, frozen=True, gc=False):
    """A completed training step of a run."""

    run_id: str
    result: StepResult


class EvaluationRow(JournalRow, frozen=True, gc=False):
    """What the eval episodes of one policy version have measured so far: ``(count, sum)`` by name."""

    run_id: str
    step: int
    sums: Mapping[str, tuple[int, float]]


class PairRow(JournalRow, frozen=True, gc=False):
    """What a challenger's group and an incumbent did with one request: a :class:`swarm.evidence.pairs.Pair` as JSON,
    and the digest of its terms."""

    run_id: str
    group_id: str
    terms: str
    pair: str


class RatingRow(JournalRow, frozen=True, gc=False):
    """What a user said of one side's answer: a :class:`swarm.evidence.ratings.SideRating` as JSON, and the digest of
    its terms; it replaces an earlier one of ``answer``, which names the answer under these terms."""

    run_id: str
    answer: str
    terms: str
    rating: str


class ForgottenEvidenceRow(JournalRow, frozen=True, gc=False):
    """The pairs, ratings and evaluations of versions above ``version`` count no more: the engine went back to it."""

    run_id: str
    version: int


class StageRow(JournalRow, frozen=True, gc=False):
    """One version of the stage of a route: a :class:`swarm.evidence.stages.ServingStage` as JSON."""

    run_id: str
    route: str
    incumbent: str
    version: int
    stage: str


class ResumptionRow(JournalRow, frozen=True, gc=False):
    """A person let training go on after ``step``, in spite of the alarms that had paused it; a half more: after the
    version of the step was evaluated, too. Once the engine went back, another row says up to where that still holds."""

    run_id: str
    step: float


class Ending(NamedTuple):
    """How an episode ended, and what became of its tokens; ``drop_reason`` is that of its :class:`EndRow`. ``keys`` are
    digests of keys that opened it."""

    client_uuid: str
    how: EndedHow
    drop_reason: str = ""
    end_key: str = ""
    tokens: TokenCounts = TokenCounts()
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveredEpisode:
    """A running episode: its claim, the digests of all its keys, its calls in order."""

    claim: EpisodeRow
    key_digests: tuple[bytes, ...]
    calls: tuple[ModelCall, ...]
    quarantine_reason: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """Everything a restarted server needs.

    ``finished`` are the trajectories that wait for a batch with their clients, oldest first; ``outstanding`` is the
    batch whose step was not recorded, to be trained again as it was; ``endings`` are the latest, oldest first;
    ``claims`` are the episodes of claims with a key, by client and key; ``tombstones`` are all deletions.
    Steps, evaluations, pairs, ratings and counts are of the current run, stages the latest of each route; ``resumed``
    is the step after which a person last let training go on.
    """

    run_id: str = ""
    job_yaml: str = ""
    stopped: bool = False
    claimed: list[RecoveredEpisode] = field(default_factory=list[RecoveredEpisode])
    finished: list[tuple[str, Trajectory]] = field(default_factory=list[tuple[str, Trajectory]])
    outstanding: BatchRow | None = None
    losses: list[GroupRow] = field(default_factory=list[GroupRow])
    agreed: list[str] = field(default_factory=list[str])
    endings: dict[str, Ending] = field(default_factory=dict[str, Ending])
    claims: dict[tuple[str, str], list[str]] = field(default_factory=dict[tuple[str, str], list[str]])
    steps: list[StepResult] = field(default_factory=list[StepResult])
    evaluations: list[EvaluationRow] = field(default_factory=list[EvaluationRow])
    pairs: list[PairRow] = field(default_factory=list[PairRow])
    ratings: list[RatingRow] = field(default_factory=list[RatingRow])
    stages: list[StageRow] = field(default_factory=list[StageRow])
    resumed: float = 0
    tombstones: list[Tombstone] = field(default_factory=list[Tombstone])
    quarantined: int = 0
    dropped: int = 0
    trained: int = 0
