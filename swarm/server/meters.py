"""Counts of one server's life: Prometheus metrics, reasons, and rates over the last minute.

Invariant: a counter only grows, and the number of time series is bounded: any reason is counted under one of at most
:data:`MAX_REASONS` names.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import cache

from prometheus_client import Counter as CounterMetric
from prometheus_client import Histogram
from starlette.routing import Route
from starlette.types import Scope

from swarm.http.exposition import new_registry
from swarm.protocol import Rates
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import (
    BatchRow,
    CallRow,
    Ending,
    EndRow,
    EpisodeRow,
    QuarantineRow,
    Recovered,
    Row,
    StateRow,
    StepRow,
)
from swarm.states import EpisodeState

#: Distinct reasons; later ones are counted as ``other``.
MAX_REASONS = 20
#: Characters of a reason's name.
MAX_REASON = 100
#: The kind at the start of a client's reason, as in ``reward_hook_failed: hook_timeout: its own words``.
_KIND = re.compile(r"[a-z0-9]+(_[a-z0-9]+)+(: [a-z0-9_]+)?(?=: |$)")
#: Counts reasons in a client's own words, which must not use up the names.
GIVEN_UP = "given_up"
#: Given up before anything was sampled: nothing is lost.
_UNUSED = "claim_withdrawn"
#: Seconds over which rates are taken.
WINDOW = 60.0

_WAITS = (0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STEPS = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"
_REQUESTS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 300.0)


class Rate:
    """The sum of the amounts added within the last :data:`WINDOW` seconds, kept by the second."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, float]] = deque()
        self._sum = 0.0

    def add(self, amount: float, now: float) -> None:
        second = int(now)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1] = (second, self._seconds[-1][1] + amount)
        else:
            self._seconds.append((second, amount))
        self._sum += amount
        self._forget(now)

    def sum(self, now: float) -> float:
        self._forget(now)
        return self._sum

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW:
            self._sum -= self._seconds.popleft()[1]
        if not self._seconds:
            self._sum = 0.0  # rounding errors must not add up


class Reasons:
    """Counts by reason; numbers in a reason are replaced, and reasons beyond :data:`MAX_REASONS` are ``other``."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, reason: str, count: int = 1) -> None:
        name = re.sub(r"\d+", "N", reason)[:MAX_REASON]
        self._counts[name if name in self._counts or len(self._counts) < MAX_REASONS else "other"] += count

    def counts(self) -> dict[str, int]:
        """Most frequent first."""
        return dict(self._counts.most_common())


class Meters:
    """Counters of one server's life.

    Args:
        clock: seconds, monotonic.

    Attributes:
        registry: the Prometheus metrics of this server.
        outcomes: how episodes ended: ``trainable``, ``eval``, ``untrainable`` (ended with a result), ``aborted``,
            ``idle``, ``capped``, ``engine``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self.outcomes: Counter[str] = Counter()
        self.quarantined = Reasons()
        self.dropped = Reasons()
        self.registry = registry = new_registry()
        claims = CounterMetric("swarm_claimed_episodes", "Episodes given out", ["type"], registry=registry)
        self._claim_waits = Histogram(
            "swarm_claim_wait_seconds", "From claim to grant", buckets=_WAITS, registry=registry
        )
        self._steps = Histogram("swarm_step_seconds", "Duration of training steps", buckets=_STEPS, registry=registry)
        self._trained = CounterMetric("swarm_trained_episodes", "Episodes of recorded steps", registry=registry)
        tokens = CounterMetric("swarm_tokens", "Tokens of the policy", ["kind"], registry=registry)
        self._sampled_tokens, self._trained_tokens = tokens.labels("sampled"), tokens.labels("trained")
        requests = CounterMetric(
            "swarm_requests", "Answered requests", ["method", "route", "status"], registry=registry
        )
        durations = Histogram(
            "swarm_request_seconds", "Until the end of the answer", ["route"], buckets=_REQUESTS, registry=registry
        )
        # looking up a metric's labels is the larger part of its cost
        self._claims, self._requests = cache(claims.labels), cache(requests.labels)
        self._request_seconds = cache(durations.labels)
        self._tokens_of_batch = 0
        self._episodes_of_batch = 0
        self._claim_rate, self._episode_rate = Rate(), Rate()
        self._sampled_rate, self._trained_rate = Rate(), Rate()

    def observe(self, row: Row) -> None:
        """Count ``row``; called with each record given to the journal."""
        match row:
            case CallRow(call=call):
                self._sampled_tokens.inc(len(call.response_ids))
                self._sampled_rate.add(len(call.response_ids), self._clock())
            case EpisodeRow(episode_type=episode_type):
                self._claims(episode_type).inc()
                self._claim_rate.add(1, self._clock())
            case EndRow():
                self._ended(row)
            case QuarantineRow(reason=reason):
                self.quarantined.add(reason)
            case StateRow(state=EpisodeState.DROPPED, episode_uuids=episodes, reason=reason, cause=cause):
                self.dropped.add(cause or reason or "", len(episodes))
            case BatchRow(batch=batch):
                trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
                self._episodes_of_batch = len(trajectories)
                self._tokens_of_batch = sum(trajectory.sampled_tokens for trajectory in trajectories)
            case StepRow(result=result):
                self._steps.observe(result.seconds)
                self._trained.inc(self._episodes_of_batch)
                self._trained_tokens.inc(self._tokens_of_batch)
                self._trained_rate.add(self._tokens_of_batch, self._clock())
                self._episodes_of_batch = self._tokens_of_batch = 0
            case _:
                pass

    def claim_granted(self, waited: float) -> None:
        """A claim was granted ``waited`` seconds after it arrived."""
        self._claim_waits.observe(waited)

    def request(self, scope: Scope, status: int, seconds: float) -> None:
        """A request was answered. It is counted under the path of its route, or as ``other``, never under a name that a
        caller made up."""
        method, route = scope["method"], scope.get("route")
        path = route.path_format if isinstance(route, Route) else _OTHER
        self._requests(method if method in _METHODS else _OTHER, path, status).inc()
        self._request_seconds(path).observe(seconds)

    def rates(self) -> Rates:
        """Means over the window, or over the server's life while that is shorter."""
        now = self._clock()
        window = min(WINDOW, max(1.0, now - self._started))
        return Rates(
            window=window,
            claims_per_minute=60 * self._claim_rate.sum(now) / window,
            episodes_per_minute=60 * self._episode_rate.sum(now) / window,
            sampled_tokens_per_second=self._sampled_rate.sum(now) / window,
            trained_tokens_per_second=self._trained_rate.sum(now) / window,
        )

    def _ended(self, record: EndRow) -> None:
        if record.how != "ended":
            self.outcomes[record.how] += 1
            if record.drop_reason and record.drop_reason != _UNUSED:
                kind = _KIND.match(record.drop_reason)
                self.dropped.add(kind[0] if kind else GIVEN_UP)
            return
        self._episode_rate.add(1, self._clock())
        if record.trajectory is not None:
            self.outcomes["trainable"] += 1
        elif record.drop_reason:
            self.outcomes["untrainable"] += 1
            if not record.drop_reason.startswith("quarantined"):
                self.dropped.add(record.drop_reason)
        else:
            self.outcomes["eval"] += 1


class MeteredJournal:
    """A journal that counts its rows as they are appended."""

    def __init__(self, journal: Journal, meters: Meters) -> None:
        self._journal = journal
        self._meters = meters

    @property
    def pending(self) -> int:
        return self._journal.pending

    def recover(self) -> Recovered:
        recovered = self._journal.recover()
        if recovered.outstanding is not None:
            # this server will train it, though an earlier one took it
            self._meters.observe(recovered.outstanding)
        return recovered

    def append(self, *rows: Row) -> None:
        self._journal.append(*rows)
        for row in rows:
            self._meters.observe(row)

    async def synced(self) -> None:
        await self._journal.synced()

    async def past_ending(self, episode_uuid: str) -> Ending | None:
        return await self._journal.past_ending(episode_uuid)
