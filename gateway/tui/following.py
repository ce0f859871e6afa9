"""One server, followed: asked again and again, patiently while it does not answer, and what is known of it.

Invariant: there is always one question under way or one wait of bounded length, and what is known says how old it is.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from pydantic import BaseModel

from gateway.cli.status import step_line
from gateway.tui import gateway_text, swarm_tables, swarm_text
from gateway.tui.asking import Asker, Trouble, unexpected
from gateway.tui.history import Chronicle, Growth, Line, Rate, StepHistory
from gateway.tui.targets import Kind, Target
from gateway.tui.told import GatewayStatus
from gateway.tui.words import seconds
from swarm.client.policy import RetryPolicy
from swarm.protocol import ServerStatus

StatusT = TypeVar("StatusT", bound=BaseModel)

#: Between two questions to a server that does not answer: jittered, from half a second to ten.
_PATIENCE = RetryPolicy(base=0.5, cap=10.0)
#: Least seconds between two questions, however often the server's state changes.
_BREATH = 0.2
#: Cells of the lines that a status is tried on; those that are shown have the screen's.
_WIDTH = 120


class Follower(ABC, Generic[StatusT]):
    """What is known of one server.

    Args:
        target: whom to ask.
        asker: asks; closed when :meth:`run` ends.
        interval: seconds between two questions.
        on_news: called after each answer, and each question without one.
        clock: monotonic seconds.
        wall: Unix seconds.

    Attributes:
        status: the last that it told; ``None`` before the first.
        trouble: why it tells nothing now; ``None`` while it does.
    """

    def __init__(
        self,
        target: Target,
        asker: Asker[StatusT],
        interval: float,
        on_news: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.target = target
        self.status: StatusT | None = None
        self.trouble: Trouble | None = None
        self.chronicle = Chronicle()
        self.failures = 0
        self._asker = asker
        self._interval = interval
        self._on_news = on_news
        self._clock = clock
        self._wall = wall
        self._seen_at = 0.0
        self._next_at = 0.0
        self._began = clock()
        self._hurry = asyncio.Event()

    @property
    def age(self) -> float | None:
        """Seconds since the status was told; ``None`` without one."""
        return None if self.status is None else self._clock() - self._seen_at

    @property
    def waited(self) -> float:
        """Seconds since it last told anything, or since the watch began."""
        return self._clock() - (self._began if self.status is None else self._seen_at)

    @property
    def next_try(self) -> float:
        """Seconds until a server that does not answer is asked again; 0 while it is being asked."""
        return max(0.0, self._next_at - self._clock())

    def hurry(self) -> None:
        """Ask now instead of later."""
        self._hurry.set()

    async def run(self) -> None:
        """Ask until cancelled."""
        try:
            while True:
                if await self._look():
                    self.failures = 0
                    pause = self._pause()
                else:
                    self.failures += 1
                    pause = _PATIENCE.delay(self.failures)
                self._next_at = self._clock() + pause
                self._on_news()
                self._hurry.clear()
                # not `wait_for`, which forgets that it was cancelled where the event is set in the same moment
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._hurry.wait()
        finally:
            await self._asker.close()

    async def _look(self) -> bool:
        """Ask once; true where a status was told that can be shown. Whatever else happens is this server's trouble."""
        try:
            answer = await self._ask()
            if not isinstance(answer, Trouble):
                self._try(answer)
                self._heard(answer)
                return True
        except Exception as exc:
            answer = unexpected(self.target, exc)
        self._missed(answer)
        return False

    def _missed(self, trouble: Trouble) -> None:
        if self.trouble is None or self.trouble.why is not trouble.why:
            self.chronicle.note(self._wall(), trouble.words)
        self.trouble = trouble

    def _heard(self, status: StatusT) -> None:
        if self.trouble is not None:
            self.chronicle.note(self._wall(), f"{self.target.address} answers again, after {seconds(self.waited)}")
        self.trouble = None
        self._see(status, self.status)
        self.status = status
        self._seen_at = self._clock()

    def _pause(self) -> float:
        return self._interval

    @abstractmethod
    async def _ask(self) -> StatusT | Trouble: ...

    @abstractmethod
    def _try(self, status: StatusT) -> None:
        """Write all that the screen may show of it, and raise what that raises."""

    @abstractmethod
    def _see(self, status: StatusT, before: StatusT | None) -> None:
        """Take from a new status what is to be remembered."""


class SwarmFollower(Follower[ServerStatus]):
    """A swarm server: a change of its engine's state is told at once, by a long poll.

    Attributes:
        history: its steps.
        episodes: ended with a result, per minute.
        tokens: sampled per second.
    """

    def __init__(self, target: Target, interval: float, on_news: Callable[[], None]) -> None:
        super().__init__(target, Asker(target, ServerStatus), interval, on_news)
        self.history = StepHistory()
        self.episodes, self.tokens = Rate(), Rate()
        self._change: int | None = None
        self._asked = 0
        self._polled = False

    async def _ask(self) -> ServerStatus | Trouble:
        self._asked = self.history.wanted
        query: dict[str, str | int | float] = {"steps": self._asked}
        self._polled = self._change is not None
        if self._change is not None:
            query |= {"after_change": self._change, "wait_seconds": self._interval}
        answer = await self._asker.ask(query, self._interval if self._polled else 0.0)
        self._change = None if isinstance(answer, Trouble) else answer.engine_changes
        return answer

    def _missed(self, trouble: Trouble) -> None:
        super()._missed(trouble)
        self._change = None
        self.history.forget()

    def _try(self, status: ServerStatus) -> None:
        for brief in (True, False):
            swarm_text.head_lines(status, ("", ""), brief)
        swarm_tables.episodes(status, swarm_tables.Order.IDLE, "", _WIDTH)
        for table in (swarm_tables.tasks, swarm_tables.clients, swarm_tables.losses):
            table(status, _WIDTH)
        swarm_tables.steps(status.steps, _WIDTH)
        swarm_tables.happened([Line(entry.timestamp, entry.message) for entry in status.log], status.last_lines, _WIDTH)

    def _pause(self) -> float:
        # a long poll has waited at the server already
        return min(_BREATH, self._interval) if self._polled else self._interval

    def _see(self, status: ServerStatus, before: ServerStatus | None) -> None:
        state, detail = status.engine.engine_status, status.engine.engine_status_detail
        if before is None or before.engine.engine_status is not state:
            told = state.removeprefix("ENGINE.")
            self.chronicle.note(self._wall(), f"engine: {told}" + (f": {detail}" if detail else ""))
        new = self.history.see(status.steps, self._asked)
        for step in new if before is not None else []:
            self.chronicle.note(self._wall(), step_line(step))
        self.chronicle.see(status.log)
        if status.rates is not None:
            self.episodes.add(status.rates.episodes_per_minute)
            self.tokens.add(status.rates.sampled_tokens_per_second)


class GatewayFollower(Follower[GatewayStatus]):
    """A gateway.

    Attributes:
        requests: per second.
        growth: of its requests.
    """

    def __init__(self, target: Target, interval: float, on_news: Callable[[], None]) -> None:
        super().__init__(target, Asker(target, GatewayStatus), interval, on_news)
        self.requests = Rate()
        self.growth = Growth()

    async def _ask(self) -> GatewayStatus | Trouble:
        return await self._asker.ask()

    def _try(self, status: GatewayStatus) -> None:
        gateway_text.head_lines(status, 0.0, ("", ""))
        for table in (gateway_text.routes, gateway_text.swarms, gateway_text.failures):
            table(status, _WIDTH)

    def _see(self, status: GatewayStatus, before: GatewayStatus | None) -> None:
        if not self.growth.see(self._clock(), status.requests):
            self.chronicle.note(self._wall(), "the gateway was started anew: its counts begin at 0")
        self.requests.add(self.growth.per_second)
        known = {} if before is None else before.errors
        for code, count in status.errors.items():
            if before is not None and count > known.get(code, 0):
                self.chronicle.note(self._wall(), f"{count - known.get(code, 0)} callers got the error {code}")
        breakers = {} if before is None else {name: route.breaker for name, route in before.routes.items()}
        for name, route in status.routes.items():
            if name in breakers and breakers[name] != route.breaker and route.breaker is not None:
                self.chronicle.note(self._wall(), f"the breaker of route {name}'s upstream is {route.breaker}")


def follow(target: Target, interval: float, on_news: Callable[[], None]) -> SwarmFollower | GatewayFollower:
    """The follower that fits ``target``."""
    kind = SwarmFollower if target.kind is Kind.SWARM else GatewayFollower
    return kind(target, interval, on_news)
