"""``Swarm``: one swarm server as the gateway uses it; ``Training``: how one route's requests train through it.

Invariant: connections and tasks that belong to a swarm server live exactly as long as its ``async with``; submissions
under way get their time first.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from gateway.background import Background
from gateway.config.route import RouteSettings
from gateway.rollout.claims import Episodes
from gateway.rollout.sampling import Sampler
from gateway.rollout.submission import Submitter
from gateway.sessions.open_groups import OpenGroups
from gateway.stats import Stats
from reward_hooks import HookRunner
from swarm.client import AsyncSwarmClient
from swarm.client.policy import RetryPolicy
from swarm.http.client import HttpClient

#: The gateway itself waits for a server that is away, within the bounds of its configuration.
_QUICK_RETRIES = RetryPolicy(attempts=3, base=0.1, cap=0.5, total=5.0)
#: Grace of submissions at shutdown; a swarm server that is gone must not hold a Ctrl-C for longer.
_LAST_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Engine:
    """The address of a swarm server's engine, for requests that belong to no episode."""

    base_url: str
    api_key: str = field(repr=False)


class Swarm:
    """One swarm server, shared by the routes that lead to it.

    Attributes:
        url: its address.
        client: control calls.
        episodes: what it serves, and claims.
        sampler: calls to an episode's address, and to the engine's.
        engine: where the engine is without an episode.
        submitter: hands rewards in.
        open_groups: scored groups that wait for feedback.
        background: work that outlives its request.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.background = Background(grace_seconds=_LAST_SECONDS)
        self.client = AsyncSwarmClient(url, token or None, policy=_QUICK_RETRIES)
        self._http = HttpClient()
        self.engine = Engine(f"{url.rstrip('/')}/v1", token)
        self.open_groups = OpenGroups(self.client)
        self.episodes = Episodes(self.client, self.background, self.open_groups)
        self.sampler = Sampler(self._http)
        self.submitter = Submitter(self.client)
        self._held = AsyncExitStack()

    def status(self) -> dict[str, Any]:
        """Its last known state as JSON."""
        serving, down_since = self.episodes.known, self.episodes.down_since
        return {
            "url": self.url,
            "engine": serving.engine or "unreachable",
            "down_since": down_since and down_since.isoformat(timespec="seconds"),
            "model": serving.model,
            "num_repeat": serving.num_repeat,
            "policy_version": serving.policy_version,
            "background": len(self.background),
            "open_groups": len(self.open_groups),
        }

    async def __aenter__(self) -> Self:
        self._held.push_async_callback(self._http.close)
        await self._held.enter_async_context(self.client)
        await self._held.enter_async_context(self.background)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.open_groups.close()
        await self._held.__aexit__(exc_type, exc, tb)


@dataclass(frozen=True, slots=True)
class Training:
    """The half of a route that trains: the swarm server that samples, and the hooks that judge.

    Attributes:
        stats: of the route, since the gateway started.
    """

    swarm: Swarm
    hooks: HookRunner
    settings: RouteSettings
    stats: Stats

    @property
    def window_seconds(self) -> float:
        """How long a judged group may stay open for feedback and for the end of its session; 0: not at all."""
        return self.settings.window_seconds(credits=self.hooks.ends_sessions)
