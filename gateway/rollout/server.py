"""``Swarm``: one swarm server as the gateway uses it: what it serves now, and groups claimed from it; ``Training``: how
one route's requests train through it.

Invariant: a claimed episode is either handed to the caller or aborted, even if the caller is gone meanwhile.
Connections and tasks that belong to a swarm server live exactly as long as its ``async with``; submissions under way
get their time first.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from gateway.config.route import RouteSettings, Share
from gateway.observability.scrubbing import without_credentials
from gateway.rollout.following import StageFollower
from gateway.rollout.sampling import Sampler, UnrecordedGroup
from gateway.sessions.open_groups import OpenGroups
from gateway.stats import Stats, SwarmStatus
from reward_hooks import HookRunner
from swarm.client import AsyncSwarmClient, EpisodeEndpoint, EpisodeGroup, ThrottleSchedule
from swarm.client.calls import NO_EPISODE_NEEDED
from swarm.client.wire import RetryPolicy, checked
from swarm.concurrency import Background
from swarm.errors import AuthenticationError, ForbiddenError, SwarmGatewayError, UnavailableError
from swarm.evidence.pairs import MAX_NAME
from swarm.evidence.ratings import SideRating
from swarm.evidence.stages import StageRules
from swarm.http.client import HttpClient
from swarm.job import TrainJob
from swarm.protocol import MAX_SECONDS, ClaimGroupRequest, SwarmThrottlePolicy
from swarm.states import EngineState
from swarm.status import ServerStatus
from swarm.types import Notes

logger = logging.getLogger(__name__)

#: Tokens of the first prompt of coding agents, their tools included.
_FIRST_PROMPTS = {"Claude Code": 27_000, "opencode": 9_000, "Codex": 7_600}
#: Seconds for which a status of the server is valid.
_STATUS_AGE = 2.0
#: Age at which the status is read again in the background.
_STATUS_STALE = 1.0
_STATUS_TIMEOUT = 5.0
#: Seconds after which the last news of a server that is away is too old to act on.
_GONE_AGE = 10.0
#: Longest delay of a reader that can do with the last known status; a healthy server answers in milliseconds.
_GLANCE_SECONDS = 0.25
#: Pauses of a request between two attempts.
_PAUSES = RetryPolicy(base=0.1, cap=1.0)
#: The gateway itself waits for a server that is away, within the bounds of its configuration.
_QUICK_RETRIES = RetryPolicy(attempts=3, base=0.1, cap=0.5, total=5.0)
#: Grace of submissions at shutdown; a swarm server that is gone must not hold a Ctrl-C for longer.
_LAST_SECONDS = 15.0

#: In the environment of a gateway under ``up``: its name at the servers, the same after its death.
NAME_VARIABLE = "SWARM_GATEWAY_NAME"
#: Where waiting rarely helps: codes of :class:`UnavailableError`, and engine states (``None``: no server).
_DOWN_CODES = frozenset({"server_unreachable", "swarm_refused", "engine_offline"})
_DOWN_STATES = frozenset({None, EngineState.OFFLINE})
#: The same where an upstream can answer instead: an engine takes minutes to boot.
_AWAY_CODES, _AWAY_STATES = _DOWN_CODES | {"engine_booting"}, _DOWN_STATES | {EngineState.BOOTING}


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What the swarm server serves; ``job``, ``num_repeat`` and ``max_model_len`` are ``None`` while it has no job.

    ``keeps_sampling``: episodes sample with the application's own parameters, greedy ones included; ``takes_partial``:
    groups that lack answers are trained; ``status``: all that the server said; ``None``: it is silent.
    """

    model: str = ""
    num_repeat: int | None = None
    policy_version: int | None = None
    engine: EngineState | None = None
    keeps_sampling: bool = False
    takes_partial: bool = False
    max_model_len: int | None = None
    job: TrainJob | None = None
    status: ServerStatus | None = None


class Waiting:
    """How long one request has waited for the swarm, with a backoff between its attempts."""

    def __init__(self, settings: RouteSettings) -> None:
        self._started = asyncio.get_running_loop().time()
        self.settings = settings
        self._failures = 0

    def left_for(self, engine: EngineState | None) -> float:
        """Seconds left of the bound for an engine in that state; ``None``: there is no server."""
        return self._left(down=engine in (_DOWN_STATES if self.settings.upstream is None else _AWAY_STATES))

    def left_after(self, code: str | None) -> float:
        """The same while claims fail with ``code``."""
        return self._left(down=code in (_DOWN_CODES if self.settings.upstream is None else _AWAY_CODES))

    async def after(self, error: UnavailableError) -> None:
        """Pause before the next attempt.

        Raises:
            UnavailableError: ``error`` itself, when the bound for its kind is reached.
        """
        if (left := self.left_after(error.code)) <= 0:
            raise error
        self._failures += 1
        await asyncio.sleep(min(left, _PAUSES.delay(self._failures)))

    def _left(self, *, down: bool) -> float:
        bound = self.settings.claim_wait_seconds
        if down:
            bound = min(bound, self.settings.offline_wait_seconds)
        return max(0.0, self._started + bound - asyncio.get_running_loop().time())


class Swarm:
    """One swarm server, shared by the routes that lead to it; a route with a share of each batch has one of its own.

    Attributes:
        client: control calls, under the name of the share, if there is one.
        sampler: calls to an episode's address, and to the engine's.
        engine: where the engine answers without an episode, as a group of one.
        open_groups: scored groups that wait for feedback.
        stages: who answers the users of routes with an incumbent.
        report: its last known status; empty before the first.
        down_since: the first failed status since the server last answered.
        falls: the versions to which its engine went back, as far as statuses tell.
    """

    def __init__(self, url: str, token: str, name: str = "", share: Share | None = None) -> None:
        self.url = url
        self._share = share
        self.background = Background(grace_seconds=_LAST_SECONDS)
        name = name or os.environ.get(NAME_VARIABLE, "")
        self.client = AsyncSwarmClient(url, token or None, name or None, policy=_QUICK_RETRIES, code="")
        self._http = HttpClient()
        self.engine = UnrecordedGroup(f"{url.rstrip('/')}/v1", token)
        self.open_groups = OpenGroups(self.client)
        self.sampler = Sampler(self._http)
        self.stages = StageFollower(self.client)
        self._held = AsyncExitStack()
        self.report = ServerReport()
        self._read_at = self._heard_at = float("-inf")
        #: why the server refuses this gateway; empty: it does not
        self._refusal = ""
        self.down_since: datetime | None = None
        self.falls: list[int] = []
        self._version = -1
        #: since when no engine serves, on the loop's clock
        self._gone_since: float | None = None
        self._reading: asyncio.Task[ServerReport] | None = None

    async def __aenter__(self) -> Self:
        self._held.push_async_callback(self._http.close)
        await self._held.enter_async_context(self.client)
        await self._held.enter_async_context(self.background)
        # log what is wrong with the job before the first request
        self._refresh()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self.open_groups.close()
        await self.stages.close()
        await self._held.__aexit__(*exc)

    def status(self) -> SwarmStatus:
        """Its last known state."""
        report, down_since = self.report, self.down_since
        return SwarmStatus(
            url=without_credentials(self.url),
            engine=report.engine or ("refuses the token" if self._refusal else "unreachable"),
            down_since=down_since and down_since.isoformat(timespec="seconds"),
            model=report.model,
            num_repeat=report.num_repeat,
            policy_version=report.policy_version,
            background=len(self.background),
            open_groups=len(self.open_groups),
            alarms=report.status.alarms if report.status is not None else [],
            learning=report.status.learning if report.status is not None else "",
        )

    async def fresh_report(self) -> ServerReport:
        """The status, at most two seconds old. While the server is silent: the last known model and group size, with
        ``engine`` ``None``."""
        reading = self._refresh()
        if reading is None or asyncio.get_running_loop().time() - self._read_at < _STATUS_AGE:
            return self.report
        return await asyncio.shield(reading)

    async def last_known(self) -> ServerReport:
        """The status for readers who must not wait: at most a quarter second for a slow server, then the last known
        one; ``engine`` is ``None`` once the server is known to be silent."""
        if (reading := self._refresh()) is not None:
            await asyncio.wait({reading}, timeout=_GLANCE_SECONDS)
        return self.report

    def gone_for(self, seconds: float) -> UnavailableError | None:
        """The error of a server or an engine that has been away for ``seconds`` or more, as far as is known; reads the
        status again in the background."""
        self._refresh()
        now = asyncio.get_running_loop().time()
        if self._gone_since is None or now - self._gone_since < seconds or now - self._heard_at > _GONE_AGE:
            return None
        if self.report.engine is None:
            return self._no_server("the swarm server has been down for a while")
        if self.report.engine is EngineState.BOOTING:
            return UnavailableError("the engine has been starting for a while", code="engine_booting")
        return UnavailableError("the engine has been offline for a while", code="engine_offline")

    async def wait_for_job(self, waited: Waiting) -> ServerReport:
        """The status, once the server has a job.

        Raises:
            UnavailableError: it has none within the bounds of the configuration.
        """
        while (report := await self.fresh_report()).num_repeat is None:
            if report.engine is None:
                await waited.after(self._no_server("the swarm server is down"))
            else:
                await waited.after(UnavailableError("the swarm server has no training job", code="engine_offline"))
        return report

    def _no_server(self, silent: str) -> UnavailableError:
        """The error for a server that gives no status: ``silent`` unless it refuses."""
        if not self._refusal:
            return UnavailableError(silent, code="server_unreachable")
        return UnavailableError(
            f"the swarm server refuses this gateway: {self._refusal}; set the gateway's swarm_token",
            code="swarm_refused",
            retry_after=30,
        )

    async def claim(self, count: int, waited: Waiting, idle_seconds: float) -> EpisodeGroup:
        """Claim a group of ``count`` episodes, which end once they idled for so long.

        Raises:
            UnavailableError: there are none within the bounds of the configuration, or the server refuses; with a code
                in ``NO_EPISODE_NEEDED`` none are needed now.
        """
        while True:
            report = await self.fresh_report()
            try:
                return await self._claim(count, waited.left_for(report.engine), waited, idle_seconds)
            except UnavailableError as exc:
                if exc.code in NO_EPISODE_NEEDED or exc.code == "journal_unavailable":
                    # a full disk: no wait of a user makes room
                    raise
                self._read_at = float("-inf")
                await waited.after(exc)
            except SwarmGatewayError as exc:
                logger.error("the swarm server refuses a claim of %d episodes: %s", count, exc.message)
                raise UnavailableError(
                    f"the swarm server refuses: {exc.message}", code="swarm_refused", retry_after=30
                ) from exc

    async def _claim(self, count: int, wait: float, waited: Waiting, idle_seconds: float) -> EpisodeGroup:
        """One claim, which has one place in the server's queue. When it is cancelled, the client withdraws it."""
        calls, throttle = self.client.calls, self._throttle()
        fields = {
            "client_uuid": calls.client_uuid,
            "count": count,
            "discard_episode_timeout": idle_seconds,
            "unless_batch_waits": True,
        }
        wanted = checked(ClaimGroupRequest, fields)

        def left(code: str) -> float:
            if code == "no_episodes":
                # a group that waits for feedback, since the claim began too, must not keep a user waiting
                self.open_groups.make_room()
            return waited.left_after(code)

        if self.open_groups.held:
            try:
                return await calls.claim(wanted, 0.0, throttle, left)
            except UnavailableError as exc:
                if exc.code != "no_episodes":
                    raise
        return await calls.claim(wanted, wait, throttle, left)

    def _throttle(self) -> SwarmThrottlePolicy | None:
        if self._share is None:
            return None
        if isinstance(self._share, tuple):
            return ThrottleSchedule(self._share).at(self.report.policy_version or 0)
        return SwarmThrottlePolicy(ratio=self._share)

    def abort(self, episodes: Sequence[EpisodeEndpoint], reason: str, notes: Notes) -> None:
        """Give the episodes back, in the background; the server keeps ``reason`` and ``notes`` with them."""
        uuids = [episode.episode_uuid for episode in episodes]
        self.background.start(self.client.abort(uuids, reason, notes), "aborting episodes")

    def record_rating(self, rating: SideRating) -> None:
        """Record what a user said of an answer, in the background; where the server does not take it, it is lost."""

        async def record() -> None:
            try:
                await self.client.record_rating(rating)
            except SwarmGatewayError as exc:
                logger.warning("a user's rating is lost: %s", exc)

        self.background.start(record(), "recording a rating")

    def _refresh(self) -> asyncio.Task[ServerReport] | None:
        """The reading of the server's status that is under way; ``None`` while the last one is young enough."""
        if asyncio.get_running_loop().time() - self._read_at < _STATUS_STALE:
            return None
        if self._reading is None or self._reading.done():
            self._reading = self.background.start(self._read(), "reading the swarm server's status")
        return self._reading

    async def _read(self) -> ServerReport:
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT):
                # megabytes of metrics each second would hold up the streams of both processes
                status = await self.client.calls.status(episodes=0, steps=0)
        except (SwarmGatewayError, TimeoutError) as exc:
            self._refusal = exc.message if isinstance(exc, AuthenticationError | ForbiddenError) else ""
            does = "refuses this gateway" if self._refusal else "does not answer for its status"
            if self.down_since is None:
                # once: it is asked again and again
                logger.warning("the swarm server at %s %s: %s", self.url, does, exc or "timeout")
            last = self.report
            now = ServerReport(
                model=last.model, num_repeat=last.num_repeat, max_model_len=last.max_model_len, job=last.job
            )
            self.down_since = self.down_since or datetime.now(UTC)
        else:
            if self.down_since is not None:
                logger.warning("the swarm server at %s answers again", self.url)
            self.down_since = None
            if self.stages.routes:
                on_disk = status.journal is None or not status.journal.pending
                self.stages.look(status.stage_changes, status.stages, on_disk=on_disk)
            job, engine = status.job, status.engine
            # of an engine that is away it is the run's last step, and a run that goes on with another's has none yet
            if engine.engine_status not in _AWAY_STATES or status.serving is not None:
                if engine.global_step < self._version:
                    self.falls.append(engine.global_step)
                self._version = engine.global_step
            now = ServerReport(
                model=status.model or (job.model_name if job is not None else ""),
                num_repeat=job.num_repeat if job is not None else None,
                policy_version=engine.global_step,
                engine=engine.engine_status,
                keeps_sampling=job is not None and job.sampling == "app",
                takes_partial=status.pool is not None and not status.pool.whole_groups,
                max_model_len=job.max_model_len if job is not None else None,
                job=job,
                status=status,
            )
        if now.max_model_len != self.report.max_model_len:
            _warn_of_short(self.url, now.max_model_len)
        self.report = now
        self._read_at = self._heard_at = asyncio.get_running_loop().time()
        # vLLM may answer without a trainer
        if now.engine not in _AWAY_STATES or (now.status is not None and now.status.serving is not None):
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = self._heard_at
        return self.report


def _warn_of_short(url: str, max_model_len: int | None) -> None:
    """Tell whoever runs the gateway which coding agents could not say a word to a new job."""
    short = [
        f"{name} ({tokens:,})" for name, tokens in _FIRST_PROMPTS.items() if tokens >= (max_model_len or tokens + 1)
    ]
    if short:
        logger.warning(
            "the job at %s takes %d tokens, prompt and answer together: too few for the first prompt of %s; raise "
            "job.max_prompt_length if such agents are to ask it",
            url,
            max_model_len,
            ", ".join(short),
        )


@dataclass(frozen=True, slots=True)
class Training:
    """The half of a route that trains: the swarm server that samples, and the hooks that judge.

    Attributes:
        stats: of the route, since the gateway started.
        gate: judges for the verdict; ``None``: the hooks do.
        suites: protected, see :attr:`swarm.evidence.pairs.Terms.suites`.
    """

    swarm: Swarm
    hooks: HookRunner
    settings: RouteSettings
    stats: Stats
    gate: HookRunner | None = None
    suites: tuple[str, ...] = ()

    @property
    def stage_rules(self) -> StageRules:
        """By which its route's stage moves; only where it serves."""
        assert self.settings.serve is not None, "without an incumbent there is no stage"
        judge = {"hook": self.judge.source[:MAX_NAME], "code": self.judge.code[:MAX_NAME]}
        more = {"num_repeat": self.settings.num_repeat, "suites": self.suites}
        return self.settings.serve.stage_rules.model_copy(update={**judge, **more})

    @property
    def judge(self) -> HookRunner:
        """Who judges for the verdict."""
        return self.gate or self.hooks

    @property
    def window_seconds(self) -> float:
        """How long a judged group may stay open for feedback and for the end of its session; 0: not at all."""
        session_window = self.settings.session_window_seconds if self.hooks.ends_sessions else 0.0
        return max(self.settings.feedback_window_seconds, session_window)

    @property
    def idle_seconds(self) -> float:
        """How long an episode may idle before its end: during other samples, hooks, feedback and submission."""
        settings, window = self.settings, self.window_seconds
        # a hook may judge twice: to choose the answer, and again with feedback
        judging = settings.hook_timeout_seconds * (2 if window else 1)
        waiting = settings.sample_timeout_seconds + judging + window
        return min(MAX_SECONDS, waiting + settings.submit_timeout_seconds + 30.0)
