"""Finished episodes, collected by task into groups and by groups into batches.

Invariant: every trajectory is in exactly one place (an open group, a complete one, or the batch that is out), leaves
it only into a batch, by a confirmed step or as :class:`Dropped`, and is never in two batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Why finished episodes will never be trained; for counters.
DropCause = Literal["lost", "uninformative", "stale", "evicted", "failed", "cleared"]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Finished episodes that waited for a batch, or were in one, and never will be trained; ``reason`` is for people."""

    episode_uuids: tuple[str, ...]
    cause: DropCause
    reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The trainer failed on the batch that was out for the ``attempts``-th time; it is the next batch again, unless it
    was ``dropped``."""

    attempts: int
    dropped: Dropped | None
