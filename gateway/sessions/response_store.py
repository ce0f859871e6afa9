"""Responses that applications asked to store, for ``previous_response_id`` and ``GET /v1/responses/{id}``.

Invariant: only the key that made a response sees it, and it is gone after its time; all together never hold more than
``max_bytes``, and the oldest leave first.

The store is this process's memory: another replica, or a restarted gateway, does not know it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import NotFoundError
from swarm.subjects import Subject
from swarm.types import Notes


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    Attributes:
        response: its body.
        items: the conversation up to and with it, as items of an ``input``.
        size: bytes of both as JSON; what it shares with earlier responses counts for each.
        notes: whose request it was.
    """

    response: dict[str, Any]
    items: list[Any]
    size: int
    notes: Notes = field(default_factory=Notes)


def unknown_response(response_id: str) -> NotFoundError:
    """The error for a response that is not stored."""
    return NotFoundError(
        f"Response with id '{response_id}' not found: it was not stored (`store: false`), has been forgotten (the "
        "oldest go first), or another key or another gateway made it.",
        code="response_not_found",
    )


class ResponseStore:
    """The responses of one gateway, oldest first; one is forgotten after so many ``seconds``, of a monotonic clock."""

    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        #: with the time at which each expires
        self._responses: OrderedDict[tuple[str, str], tuple[float, StoredResponse]] = OrderedDict()
        #: the keys of responses by those of their items
        self._items: dict[tuple[str, str], tuple[str, str]] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, key_id: str, stored: StoredResponse) -> None:
        """Store a response of the key ``key_id``, unless it alone is too large."""
        if stored.size > self._max_bytes:
            return
        key = key_id, stored.response["id"]
        self._forget(key)
        self._responses[key] = (self._clock() + self._seconds, stored)
        self._items |= {(key_id, item_id): key for item_id in _ids(stored)}
        self.size += stored.size
        self._trim()

    def get(self, key_id: str, response_id: str) -> StoredResponse:
        """A response that the key ``key_id`` made.

        Raises:
            NotFoundError: there is none, or no more.
        """
        self._trim()
        if (key_id, response_id) not in self._responses:
            raise unknown_response(response_id)
        return self._responses[key_id, response_id][1]

    def item(self, key_id: str, item_id: str) -> dict[str, Any] | None:
        """An item of the output of a response that the key ``key_id`` made."""
        self._trim()
        if (key := self._items.get((key_id, item_id))) is None:
            return None
        output: list[Any] = self._responses[key][1].response["output"]
        return next(item for item in output if isinstance(item, dict) and item.get("id") == item_id)

    def delete(self, key_id: str, response_id: str) -> None:
        """Forget a response; raises as :meth:`get`."""
        self.get(key_id, response_id)
        self._forget((key_id, response_id))

    def erase(self, subject: Subject) -> int:
        """Forget all of the subject's; how many there were."""
        mine = [key for key, (_, stored) in self._responses.items() if subject.fits(stored.notes)]
        for key in mine:
            self._forget(key)
        return len(mine)

    def _trim(self) -> None:
        now = self._clock()
        while self._responses and (self.size > self._max_bytes or next(iter(self._responses.values()))[0] <= now):
            self._forget(next(iter(self._responses)))

    def _forget(self, key: tuple[str, str]) -> None:
        _, stored = self._responses.pop(key, (0.0, None))
        if stored is None:
            return
        self.size -= stored.size
        for item_id in _ids(stored):
            # a later response may have it, too
            if self._items.get((key[0], item_id)) == key:
                del self._items[key[0], item_id]


def _ids(stored: StoredResponse) -> list[str]:
    """Of the items of its output."""
    items: list[Any] = stored.response.get("output") or []
    return [item["id"] for item in items if isinstance(item, dict) and isinstance(item.get("id"), str)]
