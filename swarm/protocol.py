"""The HTTP wire of the swarm server: one model per body and answer, compatible with AgentJet's clients.

Requests ignore unknown fields (other clients send more than we read); our answers are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field

from swarm.evidence.alarms import Alarm
from swarm.evidence.pairs import MAX_NAME as MAX_EVIDENCE_NAME
from swarm.evidence.pairs import Pair
from swarm.evidence.ratings import SideRating
from swarm.evidence.stages import MAX_REASON as MAX_REASON_OF_MOVE
from swarm.evidence.stages import ServingStage, StageRules
from swarm.evidence.verdict import Verdict
from swarm.types import Model, Notes, TolerantModel, WorkflowOutput

#: Phrases by which AgentJet's client tells why a claim failed; it searches for them in ``fail_cause``.
SYNCING = "Engine is syncing weights"
POST_ROLLING = "Engine is in post-rolling phase"
NO_EPISODES = "No available episodes to claim."
#: Begins why a claim is refused whose client has its share of the batch.
THROTTLED = "throttled"
#: AgentJet's client waits as in the phase that it knows.
BATCH_WAITS = f"{POST_ROLLING}: the trainer computes a step, and enough episodes for the next one wait or run"
TRAINING_WAITS = f"{POST_ROLLING}: training waits for a verdict or a person (`swarm-gateway policies list`)"
TRAINED_OUT = f"{POST_ROLLING}: all training steps are done"
TRAINER_AWAY = f"{SYNCING}: the trainer died, and another one is being started"

#: header of every sampled answer: the number of the weights
POLICY_VERSION = "x-swarm-policy-version"
#: header of a group's plain answer: the number of tokens of each choice, in order; the usage has only their sum
COMPLETION_TOKENS = "x-swarm-completion-tokens"
#: header of a group's call: the positions of the episodes to sample for, separated by commas; default: all
PLACES = "x-swarm-places"
#: header of a chat call without an episode: so many answers, sampled as those of a group of train episodes and recorded
#: nowhere; a plain answer has :data:`COMPLETION_TOKENS`
SAMPLES = "x-swarm-samples"
#: header of a streamed call (``1``): once begun it shall end, untrained, even if its episode is deleted for the
#: engine's next phase
OUTLIVE = "x-swarm-outlive"

EpisodeType = Literal["train", "eval"]

#: Longest name, in characters, that a caller may give to anything (itself, a task, an idempotency key).
MAX_NAME = 512
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
#: Characters kept of why an episode was given up.
MAX_REASON = 2000
#: Longest time that a caller may ask for: 30 days.
MAX_SECONDS = 30 * 86400.0
#: Seconds of one long poll of a client that goes on polling; its last one is shorter. Short, because an abandoned claim
#: keeps its turn in the queue until the poll ends.
LONG_POLL = 5.0
#: Codes of the error that an end gets whose episode is over already.
LATE_CODES = frozenset({"episode_timed_out", "episode_expired", "episode_aborted", "episode_deleted"})


class WireRequest(TolerantModel):
    """Base of request bodies: a foreign client may add fields."""


class SuccessResponse(Model):
    """Outcome of a command; ``error`` says why and what to do when it failed."""

    success: bool
    error: str | None = None


class RefusedResponse(SuccessResponse):
    """``/sync_train_config`` and ``/sync_train_code`` while the engine is not OFFLINE, with status 400 as AgentJet's
    client expects it, and code that is not taken; ``code`` is for our client."""

    code: str


class LateEndResponse(RefusedResponse):
    """``/end_episode`` without an idempotency key for an episode that is over already, with status 400 and a ``detail``
    as AgentJet's client expects them."""

    detail: str


class SwarmThrottlePolicy(WireRequest):
    """How several clients with different tasks share each batch: this client's own unique tasks in the current batch
    may be at most ``expected_batch_size * ratio``; a task already begun (``current_task_id``) is never delayed."""

    ratio: float = Field(default=1.5, gt=0, le=1e6)
    expected_batch_size: int | None = Field(default=None, ge=1, le=10**9, description="default: the job's batch_size")
    expected_num_repeat: int | None = Field(default=None, ge=1, le=10**9, description="default: the job's num_repeat")
    current_task_id: str | None = None


class ClaimEpisodeRequest(WireRequest):
    """``POST /claim_episode``. ``wait_seconds`` > 0 long-polls until an episode is free or the time is over; a claim
    that does not have the field waits up to 20 s, and only for the next batch to open.

    Of claims with one ``client_uuid`` and ``idempotency_key`` the repetitions get the first one's episodes.
    """

    client_uuid: Name
    episode_type: EpisodeType = "train"
    discard_episode_timeout: float = Field(default=240.0, gt=0, le=MAX_SECONDS, description="seconds without LLM call")
    max_episode_seconds: float | None = Field(
        default=None, gt=0, le=MAX_SECONDS, description="wall clock from claim to end; default: the server's"
    )
    throttle_policy: SwarmThrottlePolicy | None = None
    wait_seconds: float = Field(default=0.0, ge=0, le=60)
    unless_batch_waits: bool = Field(
        default=False,
        description="do not wait while vLLM serves but no episode is needed: the trainer computes a step and enough "
        "episodes for the next one wait or run, it died and is being started again, or the client has its share",
    )
    idempotency_key: Name | None = None


class WithdrawClaimRequest(WireRequest):
    """``POST /withdraw_claim``: withdraw the claim with this key. Its polls return at once, its episodes are aborted,
    and a claim with this key that arrives later is refused (``claim_withdrawn``)."""

    client_uuid: Name
    idempotency_key: Name


class ClaimEpisodeResponse(Model):
    """One claimed episode, or ``success=false`` with the reason in ``fail_cause``."""

    success: bool
    client_uuid: str
    episode_uuid: str = ""
    openai_base_url: str = ""
    openai_api_key: str = ""
    fail_cause: str = ""


class ClaimGroupRequest(ClaimEpisodeRequest):
    """``POST /claim_group``: claims ``count`` episodes at once or none, so that two half-claimed groups never wait
    for each other."""

    count: int = Field(ge=1, le=1024)


class ClaimedEpisode(Model):
    """Address and key of one claimed episode; the key works for this episode only and dies with it."""

    episode_uuid: str
    openai_base_url: str
    openai_api_key: str


class ClaimGroupResponse(Model):
    """The claimed episodes, or ``success=false`` with the reason in ``fail_cause``."""

    success: bool
    client_uuid: str
    episodes: list[ClaimedEpisode] = []
    group_uuid: str = ""
    openai_base_url: str = Field(default="", description="one call here samples an answer for each of the episodes")
    openai_api_key: str = Field(default="", description="of the group's address; dies with the first of its episodes")
    fail_cause: str = ""


_OUTPUT_FIELDS = frozenset(WorkflowOutput.model_fields)


def _tolerant(value: Any) -> Any:
    """A foreign client's workflow output as ours: unknown and null fields, and metrics that are no number, are left
    out; what is wrong with the reward stays wrong."""
    if not isinstance(value, Mapping):
        return value
    output = cast("Mapping[str, Any]", value)
    if output.get("reward") is None or isinstance(output["reward"], list):
        raise ValueError("reward: one number is needed; abort an episode that has none")
    fields = {key: field for key, field in output.items() if key in _OUTPUT_FIELDS and field is not None}
    metrics: Any = fields.get("log_metrics")
    if isinstance(metrics, Mapping):
        named = cast("Mapping[str, Any]", metrics)
        fields["log_metrics"] = {key: number for key, number in named.items() if _is_number(number)}
    return fields


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


WireOutput = Annotated[WorkflowOutput, BeforeValidator(_tolerant)]


def _cut(value: Any) -> Any:
    return value[:MAX_REASON] if isinstance(value, str) else value


class EpisodeRequest(WireRequest):
    """``POST /can_continue_episode`` and whatever names one episode of one client."""

    client_uuid: Name
    episode_uuid: Name


class AbortEpisodeRequest(EpisodeRequest):
    """``POST /abort_episode``. ``reason`` (cut at :data:`MAX_REASON` characters) and ``notes`` are kept for whoever
    wants to know why an episode was not trained."""

    reason: Annotated[str, BeforeValidator(_cut)] = ""
    notes: Notes | None = None


class EpisodeEnd(WireRequest):
    """One episode that ends, and its result."""

    episode_uuid: Name
    workflow_output: WireOutput


class EndEpisodeRequest(EpisodeEnd):
    """``POST /end_episode``. Repeating it with the same episode is answered like the first time; with another
    ``idempotency_key`` it is another end, which comes too late."""

    client_uuid: Name
    task_id: Name
    declare_client_active: bool = True
    idempotency_key: Name | None = None


class EndGroupRequest(WireRequest):
    """``POST /end_group``: ends all episodes of one task in one transition."""

    client_uuid: Name
    task_id: Name
    ends: list[EpisodeEnd] = Field(min_length=1, max_length=1024)
    idempotency_key: Name | None = None
    pair: Pair | None = Field(default=None, description="of these answers and an incumbent's, see Takeover")


class RecordPairRequest(WireRequest):
    """``POST /record_pair``: the pair of a group that no end takes along; recorded once for its ``group_id``."""

    client_uuid: Name
    pair: Pair


class RecordRatingRequest(WireRequest):
    """``POST /record_rating``: what a user said of one side's answer; a later rating of the answer replaces it."""

    client_uuid: Name
    rating: SideRating


class FollowedRoute(WireRequest):
    """A route of a gateway whose users an incumbent answers; ``incumbent_version`` is the version of the job that the
    incumbent is, 0: none of them."""

    route: str = Field(min_length=1, max_length=MAX_EVIDENCE_NAME)
    incumbent: str = Field(min_length=1, max_length=MAX_EVIDENCE_NAME)
    incumbent_version: int = Field(default=0, ge=0)
    rules: StageRules = StageRules()


class FollowStagesRequest(WireRequest):
    """``POST /follow_stages``: long-polls until `changes` is another number than ``after_change``. A gateway repeats it
    for as long as it serves; what no gateway has followed for a minute keeps no training waiting. The rules are those
    of whoever follows a route first; a token with the scope ``admin`` changes them where ``after_change`` is null."""

    client_uuid: Name
    routes: list[FollowedRoute] = Field(max_length=1000)
    after_change: int | None = None
    wait_seconds: float = Field(default=0.0, ge=0, le=60)


class StagesResponse(Model):
    """The stages of all routes behind a server; ``changes`` is a larger number after each change."""

    changes: int
    stages: list[ServingStage]


class MovePolicyRequest(WireRequest):
    """A person moves a stage; see :class:`swarm.evidence.stages.ServingStage`."""

    route: str = Field(default="", description="of the gateway; empty: the only one")
    incumbent: str = Field(default="", description="empty: the route's only one, or the latest version")
    version: int | None = Field(default=None, description="refuse if the stage has another version by now")
    reason: str = Field(min_length=1, max_length=MAX_REASON_OF_MOVE)


class PromotePolicyRequest(MovePolicyRequest):
    """``POST /policies/promote``."""

    share: float | None = Field(
        default=None, gt=0, le=1, description="of the conversations that begin, 1: live; null: the next of the rules"
    )


class RollBackPolicyRequest(MovePolicyRequest):
    """``POST /policies/rollback``."""

    recall: bool = Field(
        default=False,
        description="take back also the version that became the incumbent: that of the gateway's file answers again",
    )


class PinPolicyRequest(MovePolicyRequest):
    """``POST /policies/pin``."""

    pinned: bool = Field(default=True, description="false: verdicts move it again")


class ResumeRequest(WireRequest):
    """``POST /policies/resume``: a person lets training go on in spite of the alarms that paused it."""

    reason: str = Field(min_length=1, max_length=MAX_REASON_OF_MOVE)


class PolicyStatus(Model):
    """A challenger: its stage, and what is proven of it in this stage (null: nothing was compared yet)."""

    stage: ServingStage
    verdict: Verdict | None
    waits: str = Field(default="", description="for a person: promote or rollback; empty: for nobody")


class PoliciesResponse(Model):
    """``GET /policies``."""

    policies: list[PolicyStatus]
    training_waits: bool = Field(
        description="for a verdict, because a challenger answers users, or for a person because of an alarm"
    )
    alarms: list[Alarm] = Field(default=[], description="of the training")


class PolicyExplanation(PolicyStatus):
    """``GET /policies/explain``: the same, line by line."""

    lines: list[str]


class EpisodeTokens(Model):
    """What became of all tokens of one episode's recorded calls, over all its timelines (not the longest only).

    ``sampled == trained + repeated + dropped``. What is ``trained`` here waits for a batch; it may still be dropped
    with its group (``swarm-gateway swarm export`` knows how it ended).
    """

    calls: int = Field(description="recorded ones with a sampled token")
    timelines: int = Field(description="rows for the trainer that they were merged into")
    sampled: int = Field(description="tokens that the policy sampled")
    trained: int = Field(description="of these, in a timeline with mask 1")
    repeated: int = Field(description="of these, sampled again in the same place, and trained once")
    dropped: int = Field(description="of these, never trained: `why` says the reason")
    why: str = ""
    masked: int = Field(description="tokens between answers: results of tools, later turns of the user")
    prompts: int = Field(description="tokens of the timelines before their first answer")
    unmerged: int = Field(description="prompts and answers, if each call was a row of its own")
    kept: int = Field(description="calls whose prompt begins with the very tokens of the conversation's earlier answer")
    lost: int = Field(description="calls that go on from one whose text the chat template renders otherwise")
    edited: int = Field(description="calls that give another answer back than was sampled")


class EndedResponse(SuccessResponse):
    """``/end_episode`` and ``/end_group``; with ``success`` and an ``error`` the end stands, but nothing is trained."""

    tokens: dict[str, EpisodeTokens] = Field(default={}, description="by episode uuid")


class CanContinueResponse(Model):
    """Whether the episode is still this client's to run."""

    can_continue: bool


class AgreeSyncWeightRequest(WireRequest):
    """``POST /agree_sync_weight``: this client has no more for the current batch (the two ``..._agree_sync_weight``
    collection methods). A repetition with the same ``idempotency_key`` is answered like the first time: by then the
    current batch may be the next one."""

    client_uuid: Name
    idempotency_key: Name | None = None


class BoolResponse(Model):
    """Yes, or no and why; ``success`` with a ``failure_reason`` of ``/agree_sync_weight``: it was to an empty batch."""

    success: bool
    failure_reason: str = ""
