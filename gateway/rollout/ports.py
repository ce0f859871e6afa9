"""What fan-out asks of its surroundings: the route, its swarm, and a session's link, as far as it uses them.

Invariant: fan-out knows nothing of a route or a session that does not stand here.
"""

from __future__ import annotations

from typing import Any, Protocol

from gateway.background import Background
from gateway.config import RouteSettings
from gateway.rollout.claims import Episodes
from gateway.rollout.sampling import Address, Sampler
from gateway.rollout.submission import Submitter
from gateway.sessions.turns import Closing
from gateway.stats import Stats
from reward_hooks import HookRunner, Session
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
    @property
    def engine(self) -> Address:
        """The engine without an episode."""
        ...


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
    @property
    def window_seconds(self) -> float:
        """How long a judged group may stay open; 0: not at all."""
        ...


class Link(Protocol):
    """One request's place in its conversation."""

    @property
    def session(self) -> Session | None:
        """The turns before this one, for ``Candidate.session``."""
        ...

    @property
    def holds(self) -> bool:
        """Whether :meth:`closing` may wait: then a hook that cannot tell yet is asked again if feedback came."""
        ...

    def delivered(self, completion_id: str, message: dict[str, Any], reward: float | None, *, choices: int = 1) -> None:
        """This message is the turn's answer, the best of ``choices``; called once, before the last of it goes out."""
        ...

    def scored(self, reward: float) -> None:
        """The delivered answer got its reward after it was delivered."""
        ...

    def abandoned(self) -> None:
        """The user hung up on the answer before all of it was out."""
        ...

    async def closing(self) -> Closing:
        """Wait, behind the answer, until the group is to be submitted; at once where nothing is waited for. Called
        after :meth:`delivered`, once per group. What it returns: ask the hook once more where there is feedback, and
        add the credit to the best delivered answer's reward."""
        ...
