"""Counts since the start of the gateway, and the rest of ``GET /status``: the gateway writes these models, the monitor
reads them."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from swarm.status import EngineFailure

#: Distinct kinds of one count; error codes come from other servers too.
MAX_KINDS = 100


class DropReason(StrEnum):
    """Why a group was not trained."""

    SUBMIT_HOOK = "submit_hook_failed"
    REWARD_HOOK = "reward_hook_failed"
    SAMPLE = "sample_failed"
    PARTIAL = "stragglers_cancelled"
    SIZE = "group_size_differs_from_job"
    QUARANTINED = "quarantined"
    REFUSED = "submission_refused"
    SUBMIT_TIMEOUT = "submission_timed_out"
    CANCELLED = "request_cancelled"
    UNAVAILABLE = "engine_unavailable"


class Kinds(Counter[str]):
    """Counts by kind; kinds beyond :data:`MAX_KINDS` are counted as ``other``."""

    def __setitem__(self, kind: str, count: int) -> None:
        if kind not in self and len(self) >= MAX_KINDS:
            kind, count = "other", self["other"] + count
        super().__setitem__(kind, count)


class _Part(BaseModel):
    """Part of a status; fields that a newer gateway adds are kept."""

    model_config = ConfigDict(extra="allow")

    def __add__(self, other: Self) -> Self:
        """Both together."""
        names = type(self).model_fields
        return self.model_copy(update={name: getattr(self, name) + getattr(other, name) for name in names})


class Choice(StrEnum):
    """How an answer was chosen.

    ``judged``: the best of its group by the hook's rewards, of a group that was claimed to be trained;
    ``judged_untrained``: the same of a group that is not to be trained; ``unjudged``: one of several answers for which
    the hook gave no rewards; ``first``: policy ``first``, judged after it went out; ``single``: there was no other one;
    ``upstream``: another server's.
    """

    JUDGED = "judged"
    JUDGED_UNTRAINED = "judged_untrained"
    UNJUDGED = "unjudged"
    FIRST = "first"
    SINGLE = "single"
    UPSTREAM = "upstream"


class Groups(_Part):
    """Counts of claimed groups; ``informative`` are submitted groups whose rewards differ, ``uninformative`` ones have
    equal rewards and teach nothing."""

    trained: int = 0
    dropped: Counter[str] = Field(default_factory=Counter[str], description="by why they are not trained")
    informative: int = 0
    uninformative: int = 0


class Tokens(_Part):
    """Completion tokens of groups: of delivered answers, and of the others."""

    delivered: int = 0
    wasted: int = 0


class Accounted(_Part):
    """What the swarm server counted in the episodes that it took, over all of their timelines."""

    tokens: Counter[str] = Field(
        default_factory=Counter[str], description="sums of the numbers of `EpisodeTokens`, by their names there"
    )
    why: Counter[str] = Field(default_factory=Kinds, description="tokens that are dropped, by the server's reason")


class Stats(_Part):
    """Counts of a route's requests, or of all; touched from one event loop only."""

    requests: int = 0
    in_flight: int = 0
    answers: Counter[str] = Field(
        default_factory=Counter[str], description="by how they were chosen, see `gateway.stats.Choice`"
    )
    groups: Groups = Field(default_factory=Groups)
    tokens: Tokens = Field(default_factory=Tokens)
    malformed_calls: int = Field(
        default=0, description="tool calls in any answer of a group whose arguments are no JSON object"
    )
    accounted: Accounted = Field(default_factory=Accounted)
    passed_through: Counter[str] = Field(
        default_factory=Kinds, description="requests answered once by a rule of `pass_through`, or by the submit hook"
    )
    hook_failures: Counter[str] = Field(default_factory=Kinds, description="hook calls without a result, by error code")
    fallbacks: Counter[str] = Field(default_factory=Kinds, description="answers without a group of the swarm's, by why")
    errors: Counter[str] = Field(default_factory=Kinds, description="that callers got, by code")


class RouteLoad(_Part):
    """How full a route is; ``refused`` since the start."""

    running: int = 0
    waiting: int = 0
    refused: int = 0


class RouteStatus(Stats):
    """One route."""

    models: list[str] = []
    swarm_url: str | None = None
    upstream: str | None = None
    policy: str = ""
    train_fraction: float = 1.0
    control: str = "none"
    load: RouteLoad = RouteLoad()
    breaker: str | None = Field(default=None, description="its state; null without an upstream")


class SwarmStatus(_Part):
    """One swarm server as the gateway sees it."""

    url: str
    engine: str = ""
    down_since: str | None = None
    model: str = ""
    num_repeat: int | None = None
    policy_version: int | None = None
    background: int = 0
    open_groups: int = 0


class SessionCounts(_Part):
    """Conversations: how many are open, the bytes of their requests and answers, and counts since the start."""

    open: int = 0
    bytes: int = 0
    linked: Counter[str] = Field(default_factory=Counter[str], description="requests that continue an answer, by how")
    ended: Counter[str] = Field(default_factory=Counter[str], description="by why")
    signals: Counter[str] = Field(default_factory=Counter[str], description="by name")
    feedback: Counter[str] = Field(default_factory=Counter[str], description="that counts, or came too late to train")
    hook_failures: Counter[str] = Field(default_factory=Kinds, description="of session hooks, by code")
    credited: int = Field(default=0, description="rewards of session hooks that reached their open group")
    credit_dropped: int = Field(
        default=0, description="those that came too late for it, or to an answer that is not trained"
    )


class GatewayStatus(Stats):
    """``GET /status`` of a gateway; engine, model and policy version are of the first route with a swarm server."""

    engine: str = ""
    engine_failure: EngineFailure | None = None
    model: str = ""
    num_repeat: int | None = None
    policy_version: int | None = None
    background: int = 0
    joined: int = 0
    control: str = "none"
    routes: dict[str, RouteStatus]
    sessions: SessionCounts = SessionCounts()
    swarms: list[SwarmStatus] = []
