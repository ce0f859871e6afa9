"""What is counted of one server's life, and what a monitor shows of it.

Invariant: a counter only grows, and the number of time series is bounded: any reason is counted under one of at most
:data:`MAX_REASONS` names. Looking changes nothing, and costs no more than there are running episodes and active
clients. A pushed line is gone after :data:`KEPT_SECONDS`, and there are at most :data:`MAX_LINES`, however many are
pushed.
"""

from __future__ import annotations

import heapq
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from prometheus_client import Counter as CounterMetric
from prometheus_client import Histogram
from starlette.routing import Route
from starlette.types import Scope

from swarm.http.exposition import new_registry
from swarm.measures import TASKS, TASKS_WITH_SIGNAL
from swarm.server.engine.controller import Controller
from swarm.server.engine.runs import MAX_STEPS
from swarm.server.episodes.episode import LiveEpisode
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import (
    CallRow,
    EndRow,
    EpisodeRow,
    JournalRow,
    QuarantineRow,
    StateRow,
    StepRow,
)
from swarm.states import EpisodeState
from swarm.status import LogEntry, Rates, ReplicaStatus, RunningEpisode, ServerStatus

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
#: seconds for which a pushed line is kept, and how many lines at most
KEPT_SECONDS = 30.0
MAX_LINES = 200
#: characters of a line and of its tag
MAX_MESSAGE, MAX_TAG = 2000, 100
#: running episodes that a status lists by default
EPISODES = 100
#: How many characters of an episode's name, the last ones, are shown to callers that could end it.
SHORT_UUID = 8

_WAITS = (0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STEPS = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"
_REQUESTS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 300.0)


class Rate:
    """The sum of the amounts added within the last :data:`WINDOW` seconds, kept by the second."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def add(self, amount: float, now: float) -> None:
        second = int(now)
        if second not in self._seconds:
            self._seconds = {then: n for then, n in self._seconds.items() if then > now - WINDOW} | {second: 0.0}
        self._seconds[second] += amount

    def sum(self, now: float) -> float:
        return sum(amount for then, amount in self._seconds.items() if then > now - WINDOW)


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
        claim_waits: seconds from each claim that is granted to its grant.
        outcomes: how episodes ended: ``trainable``, ``eval``, ``untrainable`` (ended with a result), ``aborted``,
            ``idle``, ``capped``, ``engine``.
        tokens: ``sampled`` ones of recorded calls, and what became of them: ``trained``, ``repeated``, ``dropped``; the
            rest still waits or runs. ``masked`` ones lie between answers.
        dropped_tokens: sampled ones that are never trained.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self.outcomes: Counter[str] = Counter()
        self.quarantined = Reasons()
        self.dropped = Reasons()
        self.tokens: Counter[str] = Counter()
        self.dropped_tokens = Reasons()
        self.registry = registry = new_registry()
        claims = CounterMetric("swarm_claimed_episodes", "Episodes given out", ["type"], registry=registry)
        self.claim_waits = Histogram(
            "swarm_claim_wait_seconds", "From claim to grant", buckets=_WAITS, registry=registry
        )
        self._steps = Histogram("swarm_step_seconds", "Duration of training steps", buckets=_STEPS, registry=registry)
        self._trained = CounterMetric("swarm_trained_episodes", "Episodes of recorded steps", registry=registry)
        groups = CounterMetric(
            "swarm_trained_groups",
            "Groups of recorded steps, by whether they teach: their rewards differ, or they have a credit",
            ["informative"],
            registry=registry,
        )
        self._groups = {value: groups.labels(value) for value in ("true", "false")}
        tokens = CounterMetric("swarm_tokens", "Tokens of recorded calls", ["kind"], registry=registry)
        kinds = ("sampled", "trained", "repeated", "dropped", "masked")
        self._token_counters = {kind: tokens.labels(kind) for kind in kinds}
        requests = CounterMetric(
            "swarm_requests", "Answered requests", ["method", "route", "status"], registry=registry
        )
        durations = Histogram(
            "swarm_request_seconds", "Until the end of the answer", ["route"], buckets=_REQUESTS, registry=registry
        )
        # looking up a metric's labels is the larger part of its cost
        self._claims, self._requests = cache(claims.labels), cache(requests.labels)
        self._request_seconds = cache(durations.labels)
        # whether the next step is that of episodes just trained: a run that goes back records its earlier steps again
        self._step_is_new = False
        self._claim_rate, self._episode_rate = Rate(), Rate()
        self._sampled_rate, self._trained_rate = Rate(), Rate()

    def observe(self, row: JournalRow) -> None:
        """Count ``row``; called with each record given to the journal."""
        match row:
            case CallRow(call=call):
                self._count("sampled", len(call.response_ids))
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
                self._drop(row.tokens, cause or reason or "")
            case StateRow(state=EpisodeState.TRAINED, episode_uuids=episodes, tokens=tokens):
                self._trained.inc(len(episodes))
                self._count("trained", tokens)
                self._trained_rate.add(tokens, self._clock())
                self._step_is_new = True
            case StepRow(result=result) if self._step_is_new:
                self._step_is_new = False
                self._steps.observe(result.seconds)
                with_signal = result.metrics.get(TASKS_WITH_SIGNAL, 0.0)
                self._groups["true"].inc(with_signal)
                self._groups["false"].inc(max(0.0, result.metrics.get(TASKS, 0.0) - with_signal))
            case _:
                pass

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

    def _count(self, kind: str, tokens: int) -> None:
        if tokens:
            self.tokens[kind] += tokens
            self._token_counters[kind].inc(tokens)

    def _drop(self, tokens: int, cause: str) -> None:
        if tokens:
            self._count("dropped", tokens)
            self.dropped_tokens.add(cause, tokens)

    def _ended(self, record: EndRow) -> None:
        if record.how != "ended":
            self.outcomes[record.how] += 1
            cause: str = record.how
            if record.drop_reason and record.drop_reason != _UNUSED:
                kind = _KIND.match(record.drop_reason)
                cause = kind[0] if kind else GIVEN_UP
                self.dropped.add(cause)
            self._drop(record.tokens.sampled, cause)
            return
        self._episode_rate.add(1, self._clock())
        if record.trajectory is not None:
            self.outcomes["trainable"] += 1
            self._count("repeated", record.tokens.repeated)
            self._count("masked", record.tokens.masked)
        elif record.drop_reason:
            self.outcomes["untrainable"] += 1
            self._drop(record.tokens.sampled, record.drop_reason)
            if not record.drop_reason.startswith("quarantined"):
                self.dropped.add(record.drop_reason)
        else:
            self.outcomes["eval"] += 1


class MeteredJournal(Journal):
    """A journal whose rows are counted by ``meters``, which are set before anything else is done with it."""

    meters: Meters

    def append(self, *rows: JournalRow) -> None:
        super().append(*rows)
        for row in rows:
            self.meters.observe(row)


class VerboseLog:
    """The latest lines that a trainer or an operator pushed, oldest first."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._lines: deque[LogEntry] = deque(maxlen=MAX_LINES)

    def push(self, tag: str, message: str) -> None:
        """Keep a line for a while, cut to :data:`MAX_MESSAGE` characters."""
        self._lines.append(LogEntry(timestamp=self._wall(), tag=tag[:MAX_TAG], message=message[:MAX_MESSAGE]))

    def entries(self) -> list[LogEntry]:
        """The lines that are still kept."""
        oldest = self._wall() - KEPT_SECONDS
        while self._lines and self._lines[0].timestamp < oldest:
            self._lines.popleft()
        return list(self._lines)


@dataclass
class Monitor:
    """The parts of one server that a monitor shows, once its journal is open."""

    controller: Controller
    meters: Meters
    log: VerboseLog
    replicas: Callable[[], list[ReplicaStatus]]
    run_dir: Path

    def status(self, *, steps: int = MAX_STEPS, episodes: int = EPISODES, whole_uuids: bool = True) -> ServerStatus:
        """Everything, with at most ``steps`` recent steps and ``episodes`` running ones (the longest idle first)."""
        controller, meters = self.controller, self.meters
        pool = controller.pool if controller.has_job else None
        return controller.status(steps).model_copy(
            update={
                "running": running_rows(pool.running.values(), episodes, whole_uuids) if pool is not None else [],
                "longest_wait_seconds": controller.episodes.claims.longest_wait(),
                "rates": meters.rates(),
                "outcomes": dict(meters.outcomes),
                "quarantined": meters.quarantined.counts(),
                "dropped": meters.dropped.counts(),
                "tokens": dict(meters.tokens),
                "dropped_tokens": meters.dropped_tokens.counts(),
                "clients": pool.collection.rows() if pool is not None else [],
                "silent_clients": pool.collection.silent_clients if pool is not None else 0,
                "replicas": self.replicas(),
                "run_dir": str(self.run_dir),
                "journal": controller.run.journal.stats(),
                "log": self.log.entries(),
            }
        )


def running_rows(episodes: Iterable[LiveEpisode], most: int, whole_uuids: bool) -> list[RunningEpisode]:
    """Rows of at most ``most`` episodes, the longest idle first."""
    now, wall = time.monotonic(), time.time()
    chosen = heapq.nlargest(most, episodes, key=lambda episode: idle_seconds(episode, now))
    return [
        RunningEpisode(
            episode_uuid=shown_uuid(episode.episode_uuid, whole_uuids),
            client_uuid=episode.client_uuid,
            episode_type=episode.episode_type,
            task_id=episode.claim.task_hint,
            seconds=max(0.0, wall - episode.claim.claimed_at),
            seconds_left=max(0.0, episode.cap - now),
            idle_seconds=idle_seconds(episode, now),
            idle_timeout=episode.claim.idle_timeout,
            in_flight=episode.in_flight,
            calls=len(episode.calls),
            quarantined=episode.quarantine_reason,
        )
        for episode in chosen
    ]


def idle_seconds(episode: LiveEpisode, now: float) -> float:
    """For how long the episode has had no LLM call, at monotonic time ``now``."""
    return 0.0 if episode.in_flight else max(0.0, now - episode.last_active)


def shown_uuid(episode_uuid: str, whole: bool) -> str:
    """The name of an episode as a caller may see it: who knows all of it, and its client's, may end the episode."""
    return episode_uuid if whole else episode_uuid[-SHORT_UUID:]
