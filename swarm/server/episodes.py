"""One episode as the server keeps it, and the memory of how episodes ended.

Invariant: of an episode's key only the SHA-256 digest is kept, and it opens nothing once the episode is over.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from swarm.errors import SwarmGatewayError
from swarm.protocol import EpisodeType
from swarm.server.auth.token import digest
from swarm.states import EpisodeState
from swarm.types import ModelCall

#: ended episodes remembered, so that a repeated end is answered like the first
MAX_REMEMBERED = 20_000


@dataclass(eq=False)
class Episode:
    """A slot while registered; a running episode once claimed.

    ``last_active`` is in seconds of the pool's clock. ``over`` is set when the episode ends in whatever way, and
    ``over_error`` is what calls still in flight are to be told.
    """

    episode_uuid: str = field(default_factory=lambda: uuid.uuid4().hex)
    state: EpisodeState = EpisodeState.REGISTERED
    client_uuid: str = ""
    episode_type: EpisodeType = "train"
    key_digest: bytes = b""
    idle_timeout: float = 0.0
    last_active: float = 0.0
    in_flight: int = 0
    calls: list[ModelCall] = field(default_factory=list[ModelCall])
    quarantine_reason: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    over_error: SwarmGatewayError | None = None

    def hand_out(self, client_uuid: str, episode_type: EpisodeType, idle_timeout: float, now: float) -> Claim:
        """Give the episode to a client with a fresh key."""
        key = f"sk-swarm-{secrets.token_urlsafe(32)}"
        self.client_uuid = client_uuid
        self.episode_type = episode_type
        self.idle_timeout = idle_timeout
        self.last_active = now
        self.key_digest = digest(key)
        return Claim(self.episode_uuid, key)

    def idle_deadline(self) -> float | None:
        """When the episode counts as abandoned; ``None`` while a call is in flight."""
        return None if self.in_flight else self.last_active + self.idle_timeout

    def finish_calls(self, error: SwarmGatewayError) -> None:
        """Tell calls in flight that the episode is over."""
        self.key_digest = b""
        self.over_error = error
        self.over.set()


@dataclass(frozen=True, slots=True)
class Claim:
    """What a client gets for a claimed episode; the key exists nowhere else."""

    episode_uuid: str
    key: str


@dataclass(frozen=True, slots=True)
class Ending:
    """How an episode ended: ``drop_reason`` is empty unless its reward will not be trained."""

    client_uuid: str
    how: Literal["ended", "aborted", "idle", "engine"]
    drop_reason: str = ""


class Endings:
    """The last :data:`MAX_REMEMBERED` endings by episode."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._endings: OrderedDict[str, Ending] = OrderedDict()

    def remember(self, episode_uuid: str, ending: Ending) -> None:
        self._endings[episode_uuid] = ending
        while len(self._endings) > self._limit:
            self._endings.popitem(last=False)

    def get(self, episode_uuid: str) -> Ending | None:
        return self._endings.get(episode_uuid)
