"""A clock of the time in which claims can be granted.

Invariant: it never goes back, and stands still while the engine does not roll: a client can show no sign of life that
counts while a long step trains, so that time is held against nobody.
"""

from __future__ import annotations

from collections.abc import Callable

#: seconds that a time told by :meth:`RollingClock.when` is late, so that no rounding makes it early
_LATE = 1e-3


class RollingClock:
    """Seconds of ``clock`` minus those in which it was stopped; it begins running."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._offset = 0.0
        self._stopped_at: float | None = None

    def __call__(self) -> float:
        return (self._clock() if self._stopped_at is None else self._stopped_at) - self._offset

    def follow(self, rolling: bool) -> None:
        """Run or stand still from now on."""
        if rolling and self._stopped_at is not None:
            self._offset += self._clock() - self._stopped_at
            self._stopped_at = None
        elif not rolling and self._stopped_at is None:
            self._stopped_at = self._clock()

    def when(self, time: float) -> float | None:
        """When it will show ``time``, on the clock below it; ``None`` while it stands still."""
        return None if self._stopped_at is not None else time + self._offset + _LATE
