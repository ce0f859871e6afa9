"""What the swarm server says of itself, to monitors and clients: its engine, its pool, who runs what, its log; and
of saved weights, what they were trained on; shaped as in :mod:`swarm.protocol`.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from swarm.concurrency import backoff
from swarm.evidence.alarms import Alarm
from swarm.evidence.stages import MAX_REASON, ServingStage
from swarm.evidence.verdict import Verdict
from swarm.job import INFINITIES, ServingMode, TrainJob
from swarm.protocol import EpisodeType, WireRequest
from swarm.states import EngineState
from swarm.types import EvalResult, Model, StepResult

#: Starts of an engine, or of its trainer, after deaths with no training step between them.
MAX_RESTARTS = 5
#: Seconds.
_LONGEST_PAUSE = 60.0


class EngineStatus(Model):
    """``GET /get_engine_status``."""

    engine_status: EngineState
    engine_status_detail: str = ""
    global_step: int = 0


class BufferedEpisode(WireRequest):
    """One running episode; ``latest_activity_timestamp`` is Unix seconds. It leaves out address and key."""

    episode_uuid: str
    episode_status: str = ""
    episode_type: str = "train"
    client_uuid: str = ""
    openai_base_url: str = ""
    openai_api_key: str = ""
    latest_activity_timestamp: float = 0.0
    discard_episode_timeout: float = 0.0
    llm_call_count: int = 0
    optional_task_id: str = ""


class EpisodeBufferResponse(Model):
    """``POST /get_episode_buffer``: the episodes that run now."""

    buffer: list[BufferedEpisode]


class ActiveSwarmClient(Model):
    """A client that a batch waits for which all clients agree on; ``last_activity_at`` is Unix seconds."""

    client_uuid: str
    last_activity_at: float
    allowed_sync_weight: bool = Field(description="it agreed")


class SwarmClientInstruction(Model):
    """What AgentJet's server would tell its trainer."""

    active_clients: list[ActiveSwarmClient] = []


class PoolInformation(Model):
    """``GET /get_current_batch_rollout_pool_information``: what the current batch has and still needs; all zeros while
    there is no job.

    The fields from ``sample_collection_method`` on are what AgentJet's client and monitor read; in ``/status`` they are
    left at their defaults.
    """

    batch_size: int = 0
    num_repeat: int = 0
    slots: int = 0
    completed_tasks: int = 0
    completed_episodes: int = 0
    running_episodes: int = 0
    quarantined_episodes: int = 0
    dropped_episodes: int = 0
    batched_episodes: int = Field(default=0, description="of the batch that is out, or that is to be sent again")
    trained_episodes: int = Field(default=0, description="of recorded steps of this run")
    whole_groups: bool = Field(default=True, description="whether a batch is of groups of `num_repeat` only")
    by_agreement: bool = Field(default=False, description="whether clients say when the batch is complete")
    tasks: dict[str, int] = Field(default={}, description="task_id -> finished episodes")
    sample_collection_method: str = ""
    completed_episode_target: int = 0
    completed_task_target: int = 0
    completed_non_dummy_tasks: int = 0
    completed_non_dummy_task_target: int = 0
    task_expected_num_repeat: int = 0
    completed_tasks_details: dict[str, list[str]] = Field(default={}, description="task_id -> finished episode uuids")
    completed_tasks_rewards: dict[str, list[float]] = Field(default={}, description="task_id -> their rewards")
    completed_tasks_client_uuids: dict[str, list[str]] = Field(default={}, description="task_id -> their clients")
    running_episode_details: dict[str, dict[str, str]] | None = Field(
        default=None, description="episode_uuid -> what a monitor shows of it; null when none runs"
    )
    engine_status: str | None = None
    global_step: int | None = None
    booting_start_time: float | None = Field(default=None, description="Unix seconds, while the engine boots")
    swarm_client_instruction: SwarmClientInstruction = SwarmClientInstruction()
    training_model_path: str | None = Field(default=None, description="the job's model")


class LogEntry(Model):
    """One pushed line; ``timestamp`` is Unix seconds."""

    timestamp: float
    tag: str = ""
    message: str


class ClientRow(Model):
    """One client in a monitor; counts are of episodes, since the server started."""

    client_uuid: str
    active: bool = Field(description="gave a sign of life lately")
    idle_seconds: float = Field(description="since its last sign of life")
    running: int = 0
    claimed: int = 0
    ended: int = Field(default=0, description="with a result")
    aborted: int = 0
    timed_out: int = Field(default=0, description="idle or past the wall-clock cap")
    waiting: int = Field(default=0, description="finished, waiting for a batch")
    trained: int = 0
    dropped: int = Field(default=0, description="finished, but never to be trained")
    groups: int = Field(default=0, description="that its tasks make in the current batch")
    throttled: bool = Field(default=False, description="its last claim waits: it has its share of the batch")
    takes_part: bool = Field(default=False, description="ended or aborted a train episode for the current batch")
    agreed: bool = Field(default=False, description="has no more for the current batch")


class ReplicaStatus(Model):
    """One vLLM replica as the data plane sees it; ``in_flight`` counts answers (one call may sample several)."""

    address: str
    healthy: bool = Field(description="false while no connection can be made; then it is probed and gets no calls")
    in_flight: int
    calls: int = Field(description="tries of calls sent there")
    failures: int = Field(description="of those, how many failed; aborts for a weight sync are none")


class RunningEpisode(Model):
    """One claimed episode in a monitor; times are in seconds."""

    episode_uuid: str = Field(description="only its end where the caller's token claims episodes but is no admin's")
    client_uuid: str
    episode_type: EpisodeType
    task_id: str = Field(default="", description="as its claim's throttle_policy told it")
    seconds: float = Field(description="since its claim")
    seconds_left: float = Field(description="until its wall-clock cap")
    idle_seconds: float = Field(description="since its last LLM call; 0 while one is in flight")
    idle_timeout: float
    in_flight: int = Field(description="LLM calls now")
    calls: int = Field(description="LLM calls completed")
    quarantined: str = Field(default="", description="why it can never be trained")


class Rates(Model):
    """Means over the last ``window`` seconds."""

    window: float
    claims_per_minute: float
    episodes_per_minute: float = Field(description="ended with a result")
    sampled_tokens_per_second: float
    trained_tokens_per_second: float


class JournalStatus(Model):
    """The journal: what waits for the disk, and what is on it."""

    pending: int = Field(description="records that wait for the disk")
    oldest_pending_seconds: float
    last_commit_seconds: float = Field(description="how long the last commit took")
    commits: int
    records: int
    bytes: int
    error: str = Field(default="", description="why the last commit failed")


class EngineFailure(Model):
    """The engine, or its trainer, died, and has neither done a step nor been stopped on purpose since; kept while it
    starts again."""

    reason: str
    count: int = Field(ge=1, description="deaths in a row")
    wrong_config: bool = Field(default=False, description="the job is at fault: another start fails alike")
    cause: str = Field(default="", description="the first exception of vLLM's core, where it died of one")
    explained: int = Field(
        default=0, ge=0, description="of the deaths in a row, those of a request that is refused from then on"
    )
    repeated: bool = Field(
        default=False,
        description="it died of the same cause as before and sampled nothing in between: another start fails alike",
    )

    @property
    def unexplained(self) -> int:
        """The deaths in a row that count against :data:`MAX_RESTARTS`."""
        return max(0, self.count - self.explained)

    def pause(self, first: float) -> float:
        """Seconds until the next start: at most ``first`` after the first death, twice as long after each further one
        that nothing explains, up to a minute; with jitter."""
        return backoff(self.unexplained, first, _LONGEST_PAUSE)


class ComparisonStatus(Model):
    """What pairs prove of a challenger; names as of :class:`swarm.evidence.verdict.Verdict`."""

    route: str = Field(description="of the gateway whose users the incumbent answers")
    incumbent: str
    challenger: int | None = Field(description="the policy version; null: not known")
    stage: str = Field(default="shadow", description="in which it was compared: shadow, canary SHARE or live")
    verdict: Verdict


class ServerStatus(Model):
    """``GET /status``: everything a monitor shows."""

    model_config = INFINITIES

    engine: EngineStatus
    boot_stage: str = ""
    engine_seconds: float = Field(default=0.0, description="since the engine entered this state")
    serving: ServingMode | None = Field(default=None, description="when episodes run; null while no engine serves")
    training_seconds: float | None = Field(default=None, description="since the trainer got the batch that it has")
    engine_changes: int | None = Field(
        default=None,
        description="another number after each change of state, and when the trainer has a batch or has done "
        "its step: `?after_change=` it waits for the next",
    )
    weight_syncs: int = Field(default=0, description="entries into WEIGHT_SYNCING in this server's life")
    run_dir: str = Field(default="", description="of the server, as an absolute path: whose it is")
    engine_pid: int | None = None
    engine_failure: EngineFailure | None = None
    waiting_claims: int = Field(default=0, description="claims that long-poll for free episodes")
    last_lines: list[str] = Field(default=[], description="last output of a dead engine")
    warnings: list[str] = Field(default=[], description="of this engine, the latest last")
    model: str = ""
    pool: PoolInformation | None = None
    running: list[RunningEpisode] = Field(default=[], description="longest idle first; at most `?episodes=` of them")
    longest_wait_seconds: float = Field(default=0.0, description="of the claims that wait")
    rates: Rates | None = None
    outcomes: dict[str, int] = Field(default={}, description="how episodes ended, since the server started")
    quarantined: dict[str, int] = Field(default={}, description="reason -> episodes, since the server started")
    dropped: dict[str, int] = Field(default={}, description="cause -> episodes, since the server started")
    tokens: dict[str, int] = Field(
        default={},
        description="of recorded calls, since the server started: `sampled`, and of these `trained`, `repeated`"
        " (sampled again in the same place) and `dropped`; `masked` ones lie between answers",
    )
    dropped_tokens: dict[str, int] = Field(default={}, description="cause -> sampled tokens, since the server started")
    clients: list[ClientRow] = Field(default=[], description="last seen first; of the silent ones only the latest")
    silent_clients: int = Field(default=0, description="clients that are remembered and not active")
    replicas: list[ReplicaStatus] = []
    journal: JournalStatus | None = None
    log: list[LogEntry] = Field(default=[], description="lines pushed within the last half minute, oldest first")
    steps: list[StepResult] = Field(default=[], description="recent steps, oldest first")
    evaluations: list[EvalResult] = Field(default=[], description="of this run, by policy version, oldest first")
    comparisons: list[ComparisonStatus] = Field(
        default=[], description="of this run, for each incumbent that of its newest challenger"
    )
    alarms: list[Alarm] = Field(default=[], description="what the watch says of the training after its last step")
    learning: str = Field(default="", description="whether the run learns, a sentence; empty before its first reward")
    stages: list[ServingStage] = Field(default=[], description="of the routes whose users an incumbent answers")
    stage_changes: int = Field(default=0, description="a larger number after each change of `stages`")
    code: str | None = Field(default=None, description="the code snapshot that the engine says it imports")
    job_defaults: dict[str, Any] = Field(default={}, description="of the server, for fields that a job leaves open")
    job: TrainJob | None = Field(default=None, description="as synced; what the engine runs unless it is OFFLINE")
    resolved_config: dict[str, Any] | None = None


class Lineage(Model):
    """What the weights of ``step`` were trained on, in one training run or in one that it goes on with, as far as a
    journal still knows it."""

    model_config = INFINITIES

    step: int
    job: TrainJob
    steps: list[StepResult] = Field(description="each once, as it was last done, by its number; of some runs not all")
    evaluations: list[EvalResult] = Field(description="of these weights and of those before them")
    routes: dict[str, int] = Field(description="trained episodes that the journal still has, by the gateway's route")
    others: int = Field(default=0, description="the same, of clients that name no route")
    run_id: str = Field(default="", description="of the run that did the last of these steps")
    parent: str = Field(default="", description="the step of another run that this run goes on from; empty: none")
    held_out: list[str] = Field(default=[], description="what `policies eval` found of it, a sentence each")


class KeptVersion(Model):
    """A policy version whose checkpoint is kept."""

    step: int
    path: str = Field(description="of the checkpoint, on the server's machine")
    bytes: int
    reward: float | None = Field(description="mean since the checkpoint before it; null: not known")
    why: list[str] = Field(description="what keeps it")


class PolicyRecord(Lineage):
    """What a journal knows of one policy version: its lineage, what was compared, and who moved it."""

    code: list[str] = Field(description="hooks that judged its batch, with the digests of their code")
    episodes: tuple[int, int] | None = Field(
        description="first and last, by the order of their ends, that trained its steps; as far as they are kept"
    )
    verdicts: list[str] = Field(description="of each comparison: stage, incumbent, and the sentence")
    moves: list[str] = Field(description="stages in which it was served: since when, by whom and why")
    kept: KeptVersion | None = Field(default=None, description="its checkpoint; null: it is removed")


class KeptPoliciesResponse(Model):
    """``GET /policies/kept``, in the order of their steps."""

    versions: list[KeptVersion]


class DeletePolicyRequest(WireRequest):
    """``POST /policies/delete``: a person removes the checkpoint of a version."""

    step: int = Field(ge=1)
    reason: str = Field(min_length=1, max_length=MAX_REASON)
