"""Counts since the start of the gateway, shown by ``GET /status``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

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


@dataclass
class Accounted:
    """What the swarm server counted in the episodes that it took, over all of their timelines.

    Attributes:
        tokens: sums of the numbers of :class:`swarm.protocol.EpisodeTokens`, by their names there.
        why: tokens that are dropped, by the server's reason.
    """

    tokens: Counter[str] = field(default_factory=Counter[str])
    why: Counter[str] = field(default_factory=Kinds)

    def __add__(self, other: Accounted) -> Accounted:
        """Both together."""
        return Accounted(self.tokens + other.tokens, self.why + other.why)


@dataclass
class Stats:
    """Mutable counters; touched from one event loop only.

    ``informative`` are submitted groups whose rewards differ; ``uninformative`` ones have equal rewards and teach
    nothing. ``passed`` are requests that were answered once by a rule of ``pass_through``, by its name, or because the
    submit hook said so. ``hook_failures`` are hook calls without a result, by error code. Tokens are completion
    tokens of groups: of delivered answers, and of the others. ``malformed_calls`` are tool calls in any answer of a
    group whose arguments are no JSON object. ``accounted`` is what the swarm server counted.
    """

    requests: int = 0
    in_flight: int = 0
    trained: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter[DropReason])
    informative: int = 0
    uninformative: int = 0
    delivered_tokens: int = 0
    wasted_tokens: int = 0
    malformed_calls: int = 0
    accounted: Accounted = field(default_factory=Accounted)
    passed: Counter[str] = field(default_factory=Kinds)
    hook_failures: Counter[str] = field(default_factory=Kinds)
    fallbacks: Counter[str] = field(default_factory=Kinds)
    errors: Counter[str] = field(default_factory=Kinds)

    def __add__(self, other: Stats) -> Stats:
        """Both together."""
        return Stats(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(Stats)})

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "requests": self.requests,
            "in_flight": self.in_flight,
            "groups": {
                "trained": self.trained,
                "dropped": dict(self.dropped),
                "informative": self.informative,
                "uninformative": self.uninformative,
            },
            "tokens": {"delivered": self.delivered_tokens, "wasted": self.wasted_tokens},
            "malformed_calls": self.malformed_calls,
            "accounted": {"tokens": dict(self.accounted.tokens), "why": dict(self.accounted.why)},
            "passed_through": dict(self.passed),
            "hook_failures": dict(self.hook_failures),
            "fallbacks": dict(self.fallbacks),
            "errors": dict(self.errors),
        }
