"""What sessions ask of their surroundings: a route and its swarm, as far as they use them."""

from __future__ import annotations

from typing import Protocol

from gateway.config import RouteSettings
from gateway.sessions.open_groups import OpenGroups
from reward_hooks import HookRunner


class Swarm(Protocol):
    """One swarm server."""

    @property
    def open_groups(self) -> OpenGroups: ...


class Route(Protocol):
    """One route; only one with a swarm and hooks has sessions."""

    @property
    def name(self) -> str: ...
    @property
    def settings(self) -> RouteSettings: ...
    @property
    def swarm(self) -> Swarm | None: ...
    @property
    def hooks(self) -> HookRunner | None: ...
    @property
    def window_seconds(self) -> float:
        """How long a judged group may stay open; 0: not at all."""
        ...
