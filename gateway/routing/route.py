"""``Route``: the settings of one route together with what runs them.

Invariant: a route never changes; a reload makes new ones, and a request ends on the one it began with.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.background import Background
from gateway.config import RouteSettings
from gateway.routing.swarm import Swarm
from gateway.routing.upstream import Upstream
from gateway.stats import Stats
from reward_hooks import HookRunner


@dataclass(frozen=True, slots=True)
class Route:
    """Where the requests for some model names go.

    Attributes:
        name: in keys, metrics and logs.
        settings: how it answers.
        names: that applications may ask for, apart from what the swarm serves.
        answers_to_served: whether the name of the model that the swarm serves leads here too.
        swarm: samples and trains; ``None``: a plain upstream answers everything.
        upstream: answers, untrained, what the swarm cannot.
        hooks: judge its groups; there wherever ``swarm`` is.
        stats: what became of its requests since the gateway started, reloads included.
        background: what outlives a request; belongs to the swarm where there is one.
    """

    name: str
    settings: RouteSettings
    names: tuple[str, ...]
    answers_to_served: bool
    swarm: Swarm | None
    upstream: Upstream | None
    hooks: HookRunner | None
    stats: Stats
    background: Background

    @property
    def served(self) -> str:
        """The model that its swarm serves, as far as is known."""
        return self.swarm.episodes.known.model if self.swarm is not None else ""

    @property
    def all_names(self) -> list[str]:
        """What leads here now."""
        own = [self.served] if self.answers_to_served and self.served else []
        return list(dict.fromkeys([*own, *self.names]))

    @property
    def window_seconds(self) -> float:
        """How long a judged group may stay open for feedback and for the end of its session; 0: not at all."""
        waits = self.hooks is not None and self.hooks.ends_sessions
        return max(self.settings.feedback_window_seconds, self.settings.session_window_seconds if waits else 0.0)

    @property
    def lingering_seconds(self) -> float:
        """The longest that work of an answered request goes on."""
        settings = self.settings
        return (
            settings.sample_timeout_seconds
            + self.window_seconds
            + 2 * settings.hook_timeout_seconds
            + settings.submit_timeout_seconds
        )
