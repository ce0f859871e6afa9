"""What happened since the server started, counted as it happens.

Invariant: a counter only grows, and the number of different counters is bounded: whatever text a reason is, it is
counted under one of at most :data:`MAX_REASONS` names.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable

from swarm.http.exposition import Histogram
from swarm.protocol import Rates
from swarm.server.journal.rows import BatchRow, CallRow, EndRow, EpisodeRow, QuarantineRow, Row, StateRow, StepRow
from swarm.states import EpisodeState

#: different reasons that are told apart; later ones are counted as ``other``
MAX_REASONS = 20
#: characters of a reason's name
MAX_REASON = 100
#: of what a client says that gives an episode up: ``reward_hook_failed: hook_timeout: its own words``
_KIND = re.compile(r"[a-z0-9]+(_[a-z0-9]+)+(: [a-z0-9_]+)?(?=: |$)")
#: what says it in words of its own, which must not use up the names
GIVEN_UP = "given_up"
#: given up before anything was sampled: nothing is lost
_UNUSED = ("standby_unused", "claim_withdrawn")
#: seconds over which rates are taken
WINDOW = 60.0

WAIT_BOUNDS = (0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STEP_BOUNDS = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
REQUEST_BOUNDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 300.0)


class Rate:
    """The sum of what was added within the last :data:`WINDOW` seconds, kept by the second."""

    __slots__ = ("_seconds", "_sum")

    def __init__(self) -> None:
        self._seconds: deque[list[float]] = deque()
        self._sum = 0.0

    def add(self, amount: float, now: float) -> None:
        second = float(int(now))
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1][1] += amount
        else:
            self._seconds.append([second, amount])
            self._forget(now)
        self._sum += amount

    def sum(self, now: float) -> float:
        self._forget(now)
        return self._sum

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW:
            self._sum -= self._seconds.popleft()[1]
        if not self._seconds:
            self._sum = 0.0  # nothing is left for rounding errors to add up in


class Reasons:
    """Counts by reason; numbers in a reason and reasons beyond :data:`MAX_REASONS` are not told apart."""

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
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        #: by type of episode
        self.claims: Counter[str] = Counter()
        #: ``trainable``, ``eval``, ``untrainable`` (ended with a result), ``aborted``, ``idle``, ``capped``, ``engine``
        self.outcomes: Counter[str] = Counter()
        self.quarantined = Reasons()
        self.dropped = Reasons()
        self.sampled_tokens = 0
        self.trained_tokens = 0
        self.trained_episodes = 0
        self.claim_waits = Histogram(WAIT_BOUNDS)
        self.step_seconds = Histogram(STEP_BOUNDS)
        #: by (method, route, status)
        self.requests: Counter[tuple[str, str, int]] = Counter()
        #: route -> durations
        self.request_seconds: dict[str, Histogram] = {}
        self._tokens_of_batch = 0
        self._episodes_of_batch = 0
        self._claim_rate, self._episode_rate = Rate(), Rate()
        self._sampled_rate, self._trained_rate = Rate(), Rate()

    def observe(self, row: Row) -> None:
        """Count what ``row`` says; it is called with each row that the journal is given."""
        match row:
            case CallRow(call=call):
                self.sampled_tokens += len(call.response_ids)
                self._sampled_rate.add(len(call.response_ids), self._clock())
            case EpisodeRow(episode_type=episode_type):
                self.claims[episode_type] += 1
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
                self._tokens_of_batch = sum(sum(line.response_mask) for one in trajectories for line in one.timelines)
            case StepRow(result=result):
                self.step_seconds.observe(result.seconds)
                self.trained_episodes += self._episodes_of_batch
                self.trained_tokens += self._tokens_of_batch
                self._trained_rate.add(self._tokens_of_batch, self._clock())
                self._episodes_of_batch = self._tokens_of_batch = 0
            case _:
                pass

    def claim_granted(self, waited: float) -> None:
        """A claim was granted ``waited`` seconds after it had come."""
        self.claim_waits.observe(waited)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered; ``route`` is a route's template, never a path that a caller made up."""
        self.requests[method, route, status] += 1
        durations = self.request_seconds.get(route)
        if durations is None:
            durations = self.request_seconds[route] = Histogram(REQUEST_BOUNDS)
        durations.observe(seconds)

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
            if record.drop_reason and record.drop_reason not in _UNUSED:
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
