"""What the monitor remembers between two looks: steps, pushed lines, what happened, and how rates went.

Invariant: everything is bounded, whatever the servers tell and however long somebody watches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.protocol import LogEntry
from swarm.types import StepResult

#: Steps that are asked for at first, and kept.
STEPS = 300
#: Steps that are asked for once those are known: more than can be done between two looks.
FEW_STEPS = 5
#: Lines of the chronicle, and points of a rate.
_LINES, _POINTS = 500, 600


class StepHistory:
    """The steps of one server, asked for in full once and then by a few at a time."""

    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self._whole = False

    @property
    def wanted(self) -> int:
        """How many steps to ask for next."""
        return FEW_STEPS if self._whole else STEPS

    def forget(self) -> None:
        """The server may be another one by now: ask for all again, and keep what is known until then."""
        self._whole = False

    def see(self, told: Sequence[StepResult], asked: int) -> list[StepResult]:
        """Take in the last ``asked`` steps of the server, oldest first; returns those that are new.

        Where they do not join what is known, steps were missed or it is another run: the next question is for all.
        """
        known = {step.batch_id for step in self.steps}
        new = [step for step in told if step.batch_id not in known]
        if asked >= STEPS:
            self.steps = list(told)
            self._whole = True
            return new
        joined = not self.steps or any(step.batch_id in known for step in told)
        if joined:
            self.steps = [*self.steps, *new][-STEPS:]
        else:
            self.steps = list(told)
            self._whole = False
        return new


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the chronicle; ``at`` is Unix seconds, ``tag`` who said it (empty: the monitor)."""

    at: float
    text: str
    tag: str = ""


class Chronicle:
    """What happened while somebody watched, and the lines that were pushed for the monitor, kept longer than by the
    server. Oldest first."""

    def __init__(self) -> None:
        self._lines: deque[Line] = deque(maxlen=_LINES)
        self._pushed: set[Line] = set()

    @property
    def lines(self) -> list[Line]:
        """All of it, in the order of time."""
        return sorted(self._lines, key=lambda line: line.at)

    def note(self, at: float, text: str) -> None:
        """Something happened."""
        self._lines.append(Line(at, text))

    def see(self, entries: Iterable[LogEntry]) -> None:
        """Keep the pushed lines that a status tells, each once."""
        told = {Line(entry.timestamp, entry.message, entry.tag or "log") for entry in entries}
        # what the server tells no more it will not tell again
        self._lines.extend(sorted(told - self._pushed, key=lambda line: line.at))
        self._pushed = told


class Rate:
    """A number over time, for a sparkline."""

    def __init__(self) -> None:
        self._points: deque[float] = deque(maxlen=_POINTS)

    @property
    def points(self) -> list[float]:
        """As seen, oldest first."""
        return list(self._points)

    def add(self, value: float) -> None:
        """The number now."""
        self._points.append(value)


class Growth:
    """From a count that only grows to its rate, over looks that are some seconds apart.

    Args:
        span: seconds over which the rate is taken.
    """

    def __init__(self, span: float = 10.0) -> None:
        self._span = span
        self._seen: deque[tuple[float, float]] = deque()

    @property
    def per_second(self) -> float:
        """The rate over the last looks; 0 until there are two."""
        if len(self._seen) < 2:
            return 0.0
        (first, low), (last, high) = self._seen[0], self._seen[-1]
        return (high - low) / (last - first) if last > first else 0.0

    def see(self, at: float, count: float) -> bool:
        """The count at ``at`` (monotonic seconds); false where it fell, because its server began anew."""
        fell = bool(self._seen) and count < self._seen[-1][1]
        if fell:
            self._seen.clear()
        self._seen.append((at, count))
        while len(self._seen) > 2 and self._seen[1][0] <= at - self._span:
            self._seen.popleft()
        return not fell
