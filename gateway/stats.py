"""Counts since the start of the gateway, and the rest of ``GET /status``: the gateway writes these models, the monitor
reads them."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter, deque
from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from reward_hooks.contract import GroupScore
from swarm.errors import HookError
from swarm.evidence.alarms import Alarm
from swarm.status import ComparisonStatus, EngineFailure
from swarm.subjects import PRIVATE_DATA

logger = logging.getLogger(__name__)

#: The latest judged groups of a route over which means are taken.
RECENT_GROUPS = 100
#: Begins the log line of a hook's failure: the first of its kind, then the 10th, the 100th, ... The kind follows.
HOOK_FAILS = "the hook fails"
#: Numbers in a sentence, but for those of lines.
_NUMBER = re.compile(r"(?<!line )\b\d+")
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
    PRIVATE = PRIVATE_DATA


class Kinds(Counter[str]):
    """Counts by kind; kinds beyond :data:`MAX_KINDS` are counted as ``other``."""

    def __setitem__(self, kind: str, count: int) -> None:
        if kind not in self and len(self) >= MAX_KINDS:
            kind, count = "other", self["other"] + count
        super().__setitem__(kind, count)


class Sentences(Kinds):
    """Counts of what went wrong, a sentence each; those that differ in numbers alone count under the first one."""

    def add(self, sentence: str) -> int:
        """Count it; return how often its kind has come."""
        kind = _NUMBER.sub("N", sentence)
        first = next((earlier for earlier in self if _NUMBER.sub("N", earlier) == kind), sentence)
        self[first] += 1
        return self[first]


def hook_failed(error: HookError, counts: Stats | SessionCounts) -> None:
    """Count a hook's failure by its code, and by the sentence about it that quotes nobody; tell the first of its kind
    and then each power of ten."""
    code = error.code or error.type
    counts.hook_failures[code] += 1
    text, sentences = error.public_message or code, counts.hook_errors
    count = sentences.add(text) if isinstance(sentences, Sentences) else 1
    if count == 10 ** (len(str(count)) - 1):
        times = f" ({count} times)" if count > 1 else ""
        logger.error("%s%s: %s: %s", HOOK_FAILS, times, code, text)


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


class Recent(_Part):
    """The latest judged groups of each route, at most :data:`RECENT_GROUPS`: how many, those of them whose rewards
    differ, and the sums over them of a group's mean reward and of its standard deviation."""

    groups: int = 0
    with_signal: int = 0
    reward: float = 0.0
    spread: float = 0.0
    _each: deque[tuple[bool, float, float]] = PrivateAttr(default_factory=lambda: deque(maxlen=RECENT_GROUPS))

    def add(self, score: GroupScore) -> None:
        """Take in a judged group."""
        mean, values = score.mean, score.values
        # the standard deviation of the population; statistics.pstdev takes two hundred times as long
        deviation = math.dist(values, [mean] * len(values)) / math.sqrt(len(values))
        self._each.append((score.informative, mean, deviation))
        self.groups = len(self._each)
        self.with_signal = sum(differs for differs, _, _ in self._each)
        self.reward, self.spread = sum(mean for _, mean, _ in self._each), sum(each for _, _, each in self._each)


class Tokens(_Part):
    """Completion tokens of groups: of delivered answers, and of the others."""

    delivered: int = 0
    wasted: int = 0


class Prompts(_Part):
    """Prompt tokens of groups whose engine tells how many of them it had computed before, each group's once."""

    computed: int = 0
    cached: int = 0


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
    recent: Recent = Field(default_factory=Recent)
    tokens: Tokens = Field(default_factory=Tokens)
    prompts: Prompts = Field(default_factory=Prompts)
    malformed_calls: int = Field(
        default=0, description="tool calls in any answer of a group whose arguments are no JSON object"
    )
    accounted: Accounted = Field(default_factory=Accounted)
    passed_through: Counter[str] = Field(
        default_factory=Kinds, description="requests answered once by a rule of `pass_through`, or by the submit hook"
    )
    withheld: Counter[str] = Field(
        default_factory=Counter[str],
        description="neither kept nor trained with `redact: group`: requests with a private `prompt`, and claimed "
        "groups with a private `answer`",
    )
    hook_failures: Counter[str] = Field(default_factory=Kinds, description="hook calls without a result, by error code")
    hook_errors: Counter[str] = Field(
        default_factory=Sentences, description="the same by a sentence about the first of its kind, which quotes nobody"
    )
    fallbacks: Counter[str] = Field(default_factory=Kinds, description="answers without a group of the swarm's, by why")
    errors: Counter[str] = Field(default_factory=Kinds, description="that callers got, by code")
    shadows: Counter[str] = Field(
        default_factory=Kinds, description="requests of routes with an incumbent, by what became of what ran behind"
    )


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
    stage: str | None = Field(
        default=None, description="that the swarm server says; null: not known, or without `serve`"
    )
    stage_conflict: str = Field(
        default="", description="why the configured rules of the stage are not in force; empty: they are"
    )
    verdicts: list[ComparisonStatus] = Field(
        default=[], description="of the route's incumbents and their newest challengers, as the swarm server says"
    )


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
    alarms: list[Alarm] = Field(default=[], description="of its training")
    learning: str = Field(default="", description="whether it learns, a sentence")


class SessionCounts(_Part):
    """Conversations: how many are open, the bytes of their requests and answers, and counts since the start."""

    open: int = 0
    bytes: int = 0
    linked: Counter[str] = Field(default_factory=Counter[str], description="requests that continue an answer, by how")
    ended: Counter[str] = Field(default_factory=Counter[str], description="by why")
    signals: Counter[str] = Field(default_factory=Counter[str], description="by name")
    feedback: Counter[str] = Field(default_factory=Counter[str], description="that counts, or came too late to train")
    hook_failures: Counter[str] = Field(default_factory=Kinds, description="of session hooks, by code")
    hook_errors: Counter[str] = Field(default_factory=Sentences, description="the same by sentence, see `Stats`")
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
    reload_failures: int = Field(default=0, description="of its configuration; the one before stays")
    reload_error: str = Field(default="", description="why the last reload failed; empty once one succeeds")
    swarms: list[SwarmStatus] = []
