"""``ServerConfig``: everything an operator can set on the swarm server; times are in seconds."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from swarm.evidence.alarms import WatchRules
from swarm.types import Model

DEFAULT_PORT = 10086


class RouteRetention(Model):
    """What is kept of the episodes of one route."""

    keep_seconds: float | None = Field(
        default=None, gt=0, description="how long after its end an episode is kept at most; null: as others"
    )
    keep_bytes: int | None = Field(
        default=None, ge=1, description="bytes of texts and tokens above which the oldest of them go; null: as others"
    )


class ServerConfig(Model):
    """One swarm server. Without a token, here or in the run folder, it may only listen on a loopback address."""

    host: str = Field(default="127.0.0.1", min_length=1, description="beyond loopback only with a token")
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="0: any free port")
    token: str | None = Field(
        default=None,
        min_length=1,
        repr=False,
        description="a bearer token with all scopes; others: `swarm-gateway swarm tokens create`",
    )
    private_token: str | None = Field(
        default=None,
        min_length=1,
        repr=False,
        description="a further admin token, for processes started together with the server, as `up` makes one itself; "
        "anonymous local access stays open",
    )
    anonymous: bool | None = Field(
        default=None,
        description="programs on this machine need no token: true, false, or null: only while there is no token at all",
    )
    allow_code_sync: bool = Field(
        default=False, description="let admins send code that the engine runs (POST /sync_train_code)"
    )
    job_defaults: Path | None = Field(
        default=None, description="YAML file with fields of a job, for jobs that do not set them"
    )
    run_dir: Path = Field(default=Path("runs/default"), description="journal, engine log, job, checkpoints, code")
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024, description="larger request bodies get a 413")
    boot_timeout: float = Field(default=600.0, gt=0, description="engine start to first RolloutReady")
    heartbeat_timeout: float = Field(
        default=8.0, gt=1, description="silence after which an engine that serves counts as dead; it speaks each second"
    )
    post_rolling_timeout: float | None = Field(
        default=None,
        ge=0,
        description="how long running episodes may still finish once the batch is complete, unless the job says so; "
        "null: 30, and for jobs in AgentJet's form as long as the episodes' own timeouts allow",
    )
    stop_grace: float = Field(default=10.0, ge=0, description="between Stop and SIGKILL")
    max_episode_seconds: float = Field(
        default=3600.0, gt=0, description="wall clock that an episode gets from claim to end, where its claim says none"
    )
    client_timeout: float = Field(
        default=300.0, gt=0, description="silence after which no batch and no share waits for a client any more"
    )
    call_timeout: float = Field(default=1800.0, gt=0, description="one LLM call, retries and weight syncs included")
    call_attempts: int = Field(default=8, ge=1, description="tries of one LLM call that vLLM aborts or fails")

    webhook: str | None = Field(
        default=None,
        pattern=r"^https?://",
        repr=False,
        description="address that gets a POST of JSON when a challenger moves or waits for a person, see Takeover, and "
        "when an alarm begins or is over",
    )
    watch: WatchRules = Field(
        default=WatchRules(),
        description="what raises an alarm of the training, and what the alarm does",
    )
    keep_episodes: int = Field(default=100_000, ge=0, description="episodes that are over in the journal, the latest")
    keep_bytes: int = Field(
        default=4 * 1024**3, ge=1, description="bytes of the journal above which the oldest of them go nevertheless"
    )
    keep_seconds: float | None = Field(
        default=None,
        gt=0,
        description="how long after its end an episode is kept at most, unless it waits for training; null: while "
        "there is room",
    )
    keep_routes: dict[str, RouteRetention] = Field(
        default={},
        description="keep less of one route, by its name at the gateway: keep_seconds, keep_bytes; what waits for "
        "training stays",
    )

    @field_validator("token", mode="before")
    @classmethod
    def _as_sent(cls, token: object) -> object:
        # a file of secrets ends in a line's end, which no header has
        return token.strip() if isinstance(token, str) else token
