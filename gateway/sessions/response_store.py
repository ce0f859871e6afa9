"""Responses that applications asked to keep (``store``), for ``previous_response_id`` and ``GET /v1/responses/{id}``.

Invariant: a response is seen only by the key that made it, and is gone after its time; all together never hold more
than ``max_bytes``, and it is the key that holds most that loses its oldest.

The store is this process's memory: another replica, or a restarted gateway, does not know it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    Attributes:
        response: its body.
        items: the conversation up to and with it, as items of an ``input``.
        size: bytes of both as JSON; what it shares with earlier responses counts for each.
    """

    response: dict[str, Any]
    items: list[Any]
    size: int


@dataclass(slots=True)
class _Kept:
    """What one key has, oldest first, with the time at which it expires."""

    responses: OrderedDict[str, tuple[float, StoredResponse]] = field(
        default_factory=OrderedDict[str, tuple[float, StoredResponse]]
    )
    size: int = 0

    def remove(self, response_id: str) -> StoredResponse:
        _, stored = self.responses.pop(response_id)
        self.size -= stored.size
        return stored


class ResponseStore:
    """Of one gateway.

    Args:
        max_bytes: of all responses.
        seconds: after which one is forgotten.
        clock: tells seconds.
    """

    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.seconds = seconds
        self._clock = clock
        self._keys: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return sum(len(kept.responses) for kept in self._keys.values())

    @property
    def size(self) -> int:
        """Bytes of all responses."""
        return sum(kept.size for kept in self._keys.values())

    def put(self, key_id: str, stored: StoredResponse) -> None:
        """Keep a response of the key ``key_id``, unless it alone is more than there is room for."""
        self._expire()
        if stored.size > self.max_bytes:
            return
        kept = self._keys.setdefault(key_id, _Kept())
        kept.responses[stored.response["id"]] = (self._clock() + self.seconds, stored)
        kept.size += stored.size
        while self.size > self.max_bytes:
            # without the new one, which stays
            largest = max(self._keys.values(), key=lambda one: one.size - (stored.size if one is kept else 0))
            largest.remove(next(iter(largest.responses)))

    def get(self, key_id: str, response_id: str) -> StoredResponse:
        """A response that the key ``key_id`` made.

        Raises:
            NotFoundError: there is none, or no more.
        """
        self._expire()
        kept = self._keys.get(key_id)
        if kept is None or response_id not in kept.responses:
            raise NotFoundError(
                f"Response with id '{response_id}' not found: it was not stored (`store: false`), has been forgotten "
                f"after {self.seconds:g} s or for want of room, or another key or another gateway made it.",
                code="response_not_found",
            )
        return kept.responses[response_id][1]

    def delete(self, key_id: str, response_id: str) -> None:
        """Forget a response; raises as :meth:`get`."""
        self.get(key_id, response_id)
        self._keys[key_id].remove(response_id)

    def _expire(self) -> None:
        now = self._clock()
        for key_id, kept in list(self._keys.items()):
            while kept.responses and next(iter(kept.responses.values()))[0] <= now:
                kept.remove(next(iter(kept.responses)))
            if not kept.responses:
                del self._keys[key_id]
