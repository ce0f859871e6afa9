"""``GET /status`` of a gateway as the monitor reads it; what a newer gateway says beside it is kept.

Invariant: what is no gateway's status is refused, because ``requests``, ``groups`` and ``routes`` must be there.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Told(BaseModel):
    """Base: frozen, and tolerant of fields that it does not know."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Groups(Told):
    """What became of groups; ``informative`` are submitted groups whose rewards differ."""

    trained: int
    dropped: dict[str, int]
    uninformative: int
    informative: int = 0


class Tokens(Told):
    """Completion tokens of groups: of answers that somebody got, and of the others."""

    delivered: int = 0
    wasted: int = 0


class Counts(Told):
    """Counts since the gateway's start, of all requests or of a route's."""

    requests: int
    in_flight: int = 0
    groups: Groups
    tokens: Tokens = Tokens()
    hook_failures: dict[str, int] = {}
    fallbacks: dict[str, int] = {}
    errors: dict[str, int] = {}


class Load(Told):
    """How full a route is; ``refused`` since the start."""

    running: int = 0
    waiting: int = 0
    held_bytes: int = 0
    refused: int = 0


class RouteTold(Counts):
    """One route; ``breaker`` is the state of its upstream's, ``None`` without an upstream."""

    models: list[str] = []
    swarm_url: str | None = None
    upstream: str | None = None
    policy: str = ""
    train_fraction: float = 1.0
    control: str = "none"
    load: Load = Load()
    breaker: str | None = None


class SwarmTold(Told):
    """One swarm server as the gateway sees it."""

    url: str
    engine: str = ""
    down_since: str | None = None
    model: str = ""
    num_repeat: int | None = None
    policy_version: int | None = None
    background: int = 0
    open_groups: int = 0
    standby_groups: int = 0


class FailureTold(Told):
    """What the engine last died of, and how often in a row."""

    reason: str
    count: int


class GatewayStatus(Counts):
    """The whole; ``engine`` and what follows are of the first route with a swarm server."""

    engine: str = ""
    engine_failure: FailureTold | None = None
    model: str = ""
    num_repeat: int | None = None
    policy_version: int | None = None
    background: int = 0
    joined: int = 0
    control: str = "none"
    routes: dict[str, RouteTold]
    sessions: dict[str, object] = {}
    swarms: list[SwarmTold] = []
