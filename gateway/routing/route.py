"""``Route``: the settings of one route together with the servers behind it.

Invariant: a route never changes; a reload makes new ones, and a request ends on the one it began with.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.config import RouteSettings
from gateway.rollout.swarm import Swarm, Training
from gateway.routing.upstream import Upstream
from gateway.stats import Stats


@dataclass(frozen=True, slots=True)
class Route:
    """Where the requests for some model names go.

    Attributes:
        name: in keys, metrics and logs.
        settings: how it answers.
        names: that applications may ask for, apart from the model that the swarm serves.
        answers_to_served: whether the name of the swarm's model leads here too.
        training: samples and trains; ``None``: a plain upstream answers everything.
        upstream: answers, untrained, when the swarm cannot.
        stats: of its requests since the gateway started, reloads included.
    """

    name: str
    settings: RouteSettings
    names: tuple[str, ...]
    answers_to_served: bool
    training: Training | None
    upstream: Upstream | None
    stats: Stats

    @property
    def swarm(self) -> Swarm | None:
        """The swarm server, if it has one."""
        return self.training.swarm if self.training is not None else None

    @property
    def served(self) -> str:
        """The last known model of its swarm."""
        return self.training.swarm.episodes.known.model if self.training is not None else ""

    @property
    def all_names(self) -> list[str]:
        """What leads here now."""
        own = [self.served] if self.answers_to_served and self.served else []
        return list(dict.fromkeys([*own, *self.names]))

    @property
    def lingering_seconds(self) -> float:
        """The longest that work of an answered request goes on."""
        settings = self.settings
        window = self.training.window_seconds if self.training is not None else 0.0
        judging = 2 * settings.hook_timeout_seconds
        return settings.sample_timeout_seconds + window + judging + settings.submit_timeout_seconds
