"""Pollers: each follows one server and keeps the data that the monitor shows.

Invariant: there is always one request under way or one pause of bounded length; all that is kept is bounded.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from pydantic import BaseModel

from gateway.stats import GatewayStatus
from gateway.tui import gateway_view
from gateway.tui.targets import STEPS, StatusClient, Target, Trouble, nonsense
from gateway.views import swarm_view
from gateway.views.format import View, seconds
from swarm.client import RetryPolicy
from swarm.progress import step_line
from swarm.status import LogEntry, ServerStatus
from swarm.types import StepResult

StatusT = TypeVar("StatusT", bound=BaseModel)

#: Pauses between requests to a server that does not answer: jittered, from half a second to ten.
_BACKOFF = RetryPolicy(base=0.5, cap=10.0)
#: Least pause after a long poll, however often the server's state changes.
_LEAST_PAUSE = 0.2
#: Steps to request once the others are known: more than a server can do between two requests.
FEW_STEPS = 5
#: Bounds of the log and of a sparkline.
_LOG_LINES, _POINTS = 500, 600
#: Samples of a count over which its rate is taken.
_SAMPLES = 10


class StepHistory:
    """The steps of one server, requested in full once and then a few at a time."""

    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self.wanted = STEPS  # how many to request next

    def forget(self) -> None:
        """Request all steps next, because it may be another server by now; keep the known ones until then."""
        self.wanted = STEPS

    def add(self, latest: Sequence[StepResult]) -> list[StepResult]:
        """Take in the last ``wanted`` steps of the server, oldest first; return the new ones.

        If none of them is known, steps were missed or it is another run: the next request is for all.
        """
        batches = {step.batch_id for step in self.steps}
        new = [step for step in latest if step.batch_id not in batches]
        joined = not batches or len(new) < len(latest)
        if joined and self.wanted == FEW_STEPS:
            self.steps = [*self.steps, *new][-STEPS:]
        else:
            self.steps, self.wanted = list(latest), FEW_STEPS if self.wanted == STEPS else STEPS
        return new


class MonitorLog:
    """Events that the monitor noticed, which have no tag, and lines pushed to the server, which are kept longer than at
    the server."""

    def __init__(self) -> None:
        self._lines: deque[LogEntry] = deque(maxlen=_LOG_LINES)
        self._pushed = set[tuple[float, str, str]]()

    @property
    def lines(self) -> list[LogEntry]:
        """All of it, oldest first."""
        return sorted(self._lines, key=lambda line: line.timestamp)

    def note(self, text: str) -> None:
        """Add an event of now."""
        self._lines.append(LogEntry(timestamp=time.time(), message=text))

    def add(self, entries: Iterable[LogEntry]) -> None:
        """Keep the pushed lines of a status, each once."""
        tagged = [entry.model_copy(update={"tag": entry.tag or "log"}) for entry in entries]
        pushed = {(entry.timestamp, entry.tag, entry.message): entry for entry in tagged}
        # the server never repeats a line that it dropped
        self._lines.extend(entry for line, entry in pushed.items() if line not in self._pushed)
        self._pushed = set(pushed)


class Poller(ABC, Generic[StatusT]):
    """Follows one server.

    Args:
        target: the server.
        interval: seconds between two requests.
        on_change: called after each request.

    Attributes:
        status, view: the last one, and what it shows; ``None`` before the first.
        trouble: why there is no status now; ``None`` while there is.
        failures: in a row.
    """

    def __init__(self, target: Target, interval: float, on_change: Callable[[], None]) -> None:
        self.target = target
        self.status: StatusT | None = None
        self.view: View | None = None
        self.trouble: Trouble | None = None
        self.log = MonitorLog()
        self.failures = 0
        self._client = StatusClient(target)
        self._interval = self._pause = interval
        self._on_change = on_change
        self._last_at = time.monotonic()
        self._next_at = 0.0

    @property
    def age(self) -> float | None:
        """Age of the status in seconds; ``None`` without one."""
        return None if self.status is None else time.monotonic() - self._last_at

    @property
    def next_try(self) -> float:
        """Seconds until the next request; 0 while one is under way."""
        return max(0.0, self._next_at - time.monotonic())

    async def run(self) -> None:
        """Send requests until cancelled."""
        try:
            while True:
                trouble = await self._poll()
                if trouble is None:
                    self.failures, pause = 0, self._pause
                else:
                    self.failures += 1
                    pause = _BACKOFF.delay(self.failures)
                    if self.trouble is None or self.trouble.reason is not trouble.reason:
                        self.log.note(trouble.message)
                    self._forget()
                self.trouble = trouble
                self._next_at = time.monotonic() + pause
                self._on_change()
                await asyncio.sleep(pause)
        finally:
            await self._client.close()

    async def _poll(self) -> Trouble | None:
        """Send one request; a failure, also of ours to show the status, is this server's trouble alone."""
        try:
            answer = await self._ask()
            if isinstance(answer, Trouble):
                return answer
            self.view = self._take(answer, self.status)
        except Exception as exc:
            return nonsense(self.target, exc)
        self.status = answer
        if self.trouble is not None:
            self.log.note(f"{self.target.address} answers again, after {seconds(time.monotonic() - self._last_at)}")
        self._last_at = time.monotonic()
        return None

    def _forget(self) -> None:
        """The server did not answer; it may be another one when it does."""

    @abstractmethod
    async def _ask(self) -> StatusT | Trouble: ...

    @abstractmethod
    def _take(self, status: StatusT, before: StatusT | None) -> View:
        """Keep the parts of a new status that outlive it, and make its view."""


class SwarmPoller(Poller[ServerStatus]):
    """Follows a swarm server; a long poll reports a change of its engine's state at once.

    Attributes:
        history: its steps.
        episodes, tokens: episodes ended per minute and tokens sampled per second, over time.
    """

    def __init__(self, target: Target, interval: float, on_change: Callable[[], None]) -> None:
        super().__init__(target, interval, on_change)
        self.history = StepHistory()
        self.episodes, self.tokens = deque[float](maxlen=_POINTS), deque[float](maxlen=_POINTS)
        self._change: int | None = None
        self._pause = min(_LEAST_PAUSE, interval)

    async def _ask(self) -> ServerStatus | Trouble:
        query: dict[str, int | float] = {"steps": self.history.wanted}
        wait = 0.0
        if self._change is not None:
            # it waits at the server instead of here
            wait = self._interval
            query |= {"after_change": self._change, "wait_seconds": wait}
        answer = await self._client.get(ServerStatus, query, wait)
        self._change = None if isinstance(answer, Trouble) else answer.engine_changes
        return answer

    def _forget(self) -> None:
        self._change = None
        self.history.forget()

    def _take(self, status: ServerStatus, before: ServerStatus | None) -> View:
        state, detail = status.engine.engine_status, status.engine.engine_status_detail
        if before is None or before.engine.engine_status is not state:
            self.log.note(f"engine: {state.removeprefix('ENGINE.')}" + (f": {detail}" if detail else ""))
        new = self.history.add(status.steps)
        for step in new if before is not None else []:
            self.log.note(step_line(step))
        self.log.add(status.log)
        if status.rates is not None:
            self.episodes.append(status.rates.episodes_per_minute)
            self.tokens.append(status.rates.sampled_tokens_per_second)
        return swarm_view.view(status, self.history.steps, self.episodes, self.tokens)


class GatewayPoller(Poller[GatewayStatus]):
    """Follows a gateway."""

    def __init__(self, target: Target, interval: float, on_change: Callable[[], None]) -> None:
        super().__init__(target, interval, on_change)
        self._requests: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)

    async def _ask(self) -> GatewayStatus | Trouble:
        return await self._client.get(GatewayStatus)

    def _take(self, status: GatewayStatus, before: GatewayStatus | None) -> View:
        if self._requests and status.requests < self._requests[-1][1]:
            self._requests.clear()
            before = GatewayStatus(routes={})
            self.log.note("the gateway restarted: its counts begin at 0")
        self._requests.append((time.monotonic(), status.requests))
        earlier = before or status
        for code, more in (status.errors - earlier.errors).items():
            self.log.note(f"{more} callers got the error {code}")
        for sentence, more in (status.hook_errors - (before.hook_errors if before else Counter())).items():
            self.log.note(f"the hook fails, {more} x {sentence}")
        if status.reload_error and status.reload_failures != (before.reload_failures if before else 0):
            self.log.note(f"a reload failed, the configuration before stays: {status.reload_error}")
        for name, route in status.routes.items():
            previous = earlier.routes.get(name)
            if previous is not None and route.breaker is not None and previous.breaker != route.breaker:
                self.log.note(f"the breaker of route {name}'s upstream is {route.breaker}")
        (first, low), (last, high) = self._requests[0], self._requests[-1]
        return gateway_view.view(status, (high - low) / (last - first) if last > first else 0.0)
