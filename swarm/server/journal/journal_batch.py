"""Records of one decision go to the journal as one: a crash finds all of them there, or none.

Invariant: the order in which records were given is the order in which they are appended; none is held back beyond the
block that holds them, however that is left.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from swarm.server.journal.records import Record


class Together:
    """Appends what it is called with; inside :meth:`hold` only at its end, all at once.

    Args:
        append: takes records for the journal, those of one call in one transaction; never blocks.
    """

    def __init__(self, append: Callable[..., None]) -> None:
        self._append = append
        self._held: list[Record] | None = None
        self._depth = 0

    def __call__(self, *records: Record) -> None:
        if self._held is None:
            self._append(*records)
        else:
            self._held += records

    def hold(self) -> Self:
        """For a ``with`` statement. Not to be held across a wait: others' records would be held back too."""
        return self

    # a contextmanager would cost each end as much as half of its records
    def __enter__(self) -> None:
        self._depth += 1
        if self._held is None:
            self._held = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        # also after an error: what has happened in memory has happened
        held, self._held = self._held, None
        if held:
            self._append(*held)
