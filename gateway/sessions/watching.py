"""What a gateway shows of its groups while they are judged: to whoever watches, if anybody does.

Invariant: only groups whose texts may be kept are shown; a watcher holds nothing up and changes nothing by watching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.sessions.conversation import DeliveredTurn
from gateway.types import Incoming
from reward_hooks import Candidate, GroupScore
from swarm.errors import HookError
from swarm.types import Notes


@dataclass(frozen=True, slots=True)
class WatchedGroup:
    """A group that its hook has just judged.

    Attributes:
        session: the name of its conversation; may be empty.
        notes: whose request it is, and where the hook comes from.
        indices: of the answers in the group; ``candidates`` and the rewards of ``score`` are in this order.
        score: the rewards; ``None``: the hook gave none, ``failure`` says why.
        turn: the delivered answer, once there is one that may be remembered.
    """

    group_id: str
    incoming: Incoming
    route: str
    session: str
    notes: Notes
    indices: Sequence[int]
    candidates: Sequence[Candidate]
    score: GroupScore | None
    failure: HookError | None
    turn: DeliveredTurn | None


class GroupWatcher(Protocol):
    """Is called in the event loop of the requests; what it raises is logged."""

    def judged(self, group: WatchedGroup) -> None:
        """The hook has judged; once more where feedback or further answers came."""
        ...

    def settling(self, group_id: str, delivered: Sequence[int], turn: DeliveredTurn | None) -> None:
        """The answers with these indices are delivered, the best first; the group is open or waits to be submitted."""
        ...

    def over(self, group_id: str, reason: str | None) -> None:
        """The group is trained, or, with a ``reason``, not."""
        ...

    def forget(self, group_id: str) -> None:
        """The group's texts may not be kept after all."""
        ...

    def compared(self, group_id: str, difference: float) -> None:
        """The group's answers were judged beside the incumbent's: their mean reward is better by ``difference``."""
        ...

    async def erase(self, fits: Callable[[Notes], bool]) -> dict[str, int]:
        """Delete what is kept of requests whose notes fit; how much there was, by name.

        Raises:
            OSError: a file cannot be rewritten.
        """
        ...
