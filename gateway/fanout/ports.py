"""What fan-out asks of its surroundings: the route, its swarm, and a session's link, as far as it uses them.

Invariant: fan-out knows nothing of a route or a session that does not stand here.
"""

from __future__ import annotations

from typing import Any, Protocol

from gateway.background import Background
from gateway.config import RouteSettings
from gateway.fanout.episodes import Episodes
from gateway.fanout.sampling import Sampler
from gateway.fanout.submission import Submitter
from gateway.stats import Stats
from reward_hooks import Feedback, HookRunner, Session
from swarm.client import AsyncSwarmClient


class Swarm(Protocol):
    """One swarm server, shared by the routes that lead to it."""

    @property
    def client(self) -> AsyncSwarmClient: ...
    @property
    def episodes(self) -> Episodes: ...
    @property
    def sampler(self) -> Sampler: ...
    @property
    def submitter(self) -> Submitter: ...


class Route(Protocol):
    """One route with a swarm and hooks."""

    @property
    def name(self) -> str: ...
    @property
    def settings(self) -> RouteSettings: ...
    @property
    def swarm(self) -> Swarm | None: ...
    @property
    def hooks(self) -> HookRunner | None: ...
    @property
    def stats(self) -> Stats: ...
    @property
    def background(self) -> Background: ...


class Link(Protocol):
    """One request's place in its conversation."""

    @property
    def session(self) -> Session | None:
        """The turns before this one, for ``Candidate.session``."""
        ...

    def delivered(self, completion_id: str, message: dict[str, Any], reward: float | None) -> None:
        """This message is the turn's answer; called once, when it goes out."""
        ...

    async def feedback(self) -> Feedback | None:
        """What the user lets be known of the delivered answer until the window closes, for a last judgement of the
        group; ``None``: nothing came, or there is no window. Never called before :meth:`delivered`."""
        ...
