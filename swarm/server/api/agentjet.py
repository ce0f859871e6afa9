"""Routes that only AgentJet's clients and monitors use, and those of its trainer.

Invariant: names of other callers' episodes are given in full only to callers that may do anything (see
:func:`sees_uuids`); requests of AgentJet's own trainer are refused and change nothing.

AgentJet's trainer registers episodes and reports its state over HTTP. Here the server drives the engine over its own
link (:mod:`swarm.link`), and claims create the episodes, so AgentJet's trainer cannot be plugged in: if it were
answered with success, it would wait for ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from swarm.errors import ConflictError, SwarmGatewayError
from swarm.link.imported import top_level
from swarm.protocol import (
    BoolResponse,
    IsEpisodeClaimedRequest,
    LateEndResponse,
    RefusedResponse,
    ServerExperimentDirResponse,
    SuccessResponse,
)
from swarm.server.auth import ControlRoute, TokenHolder
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.episodes.episode import LiveEpisode
from swarm.server.monitor import VerboseLog, idle_seconds, shown_uuid
from swarm.states import EngineState
from swarm.status import (
    ActiveSwarmClient,
    BufferedEpisode,
    EngineStatus,
    EpisodeBufferResponse,
    PoolInformation,
    PushVerboseLogRequest,
    SwarmClientInstruction,
    VerboseLogsResponse,
)

#: Its clients of March and April 2026 cache the engine's state for 0.5 s.
REMEMBERED_SECONDS = 0.6
#: Every 5 s its clients check, in a slightly old state, whether the sync that they agreed to has begun.
SHOWN_SECONDS = 7.0

#: How long a claim waits for the next batch to open: refused, its clients would sleep for 15 s. They give a request up
#: after 30 s.
HELD_SECONDS = 20.0

#: Paths that AgentJet's trainer posts to.
TRAINER_PATHS = (
    "/register_episode",
    "/update_engine_status",
    "/update_current_batch_rollout_pool_information",
    "/update_current_batch_rollout_pool_information_and_fetch_instruction",
)


class StateShown:
    """The engine's state as AgentJet's clients must see it (``/get_engine_status``), because they poll it rarely.

    A sync that clients agreed to is shown for :data:`SHOWN_SECONDS` after its end, even if the engine rolls again or is
    done: otherwise a client that agreed would wait for ever. Whoever believes it merely claims later.
    """

    def __init__(self, controller: Controller, clock: Callable[[], float] = time.monotonic) -> None:
        self._controller = controller
        self._clock = clock
        self._offline_told = -math.inf

    def status(self) -> EngineStatus:
        status = self._controller.engine_status()
        boots = status.engine_status is EngineState.BOOTING
        if not boots and self._clock() - self._controller.episodes.agreement_over < SHOWN_SECONDS:
            shown = EngineState.WEIGHT_SYNCING
            detail = status.engine_status_detail
            if status.engine_status is not shown:
                detail = f"the sync that clients agreed to is over; the engine is {status.engine_status}: {detail}"
            return status.model_copy(update={"engine_status": shown, "engine_status_detail": detail})
        if status.engine_status is EngineState.OFFLINE:
            self._offline_told = self._clock()
        return status

    def until_forgotten(self) -> float:
        """Seconds until no client still has OFFLINE in its cache."""
        return max(0.0, self._offline_told + REMEMBERED_SECONDS - self._clock())


@dataclass(frozen=True)
class AgentJetRoutes:
    """What AgentJet's client needs beside claims and ends."""

    config: ServerConfig
    controller: Controller
    log: VerboseLog

    def routes(self) -> list[BaseRoute]:
        always = {409: "always"}
        return [
            ControlRoute("GET", "/get_current_batch_rollout_pool_information", self.pool_information, "read"),
            # it shows the ids of everyone's episodes, and whoever knows an episode's id may end it
            ControlRoute("POST", "/get_episode_buffer", self.get_episode_buffer, "admin"),
            ControlRoute("POST", "/is_episode_claimed", self.is_episode_claimed, "claim"),
            ControlRoute("GET", "/get_server_experiment_dir", self.get_server_experiment_dir, "read"),
            ControlRoute("POST", "/push_verbose_log", self.push_verbose_log, "admin"),
            ControlRoute("GET", "/get_verbose_logs", self.get_verbose_logs, "read"),
            *(ControlRoute("POST", path, self.trainer, "admin", refusals=always) for path in TRAINER_PATHS),
        ]

    async def pool_information(self, request: Request) -> PoolInformation:
        """What the current batch has and still needs."""
        return pool_information(self.controller, whole_uuids=sees_uuids(request))

    async def get_episode_buffer(self) -> EpisodeBufferResponse:
        """The running episodes."""
        if not self.controller.has_job:
            return EpisodeBufferResponse(buffer=[])
        wall, now = time.time(), time.monotonic()
        buffer = [
            BufferedEpisode(
                episode_uuid=episode.episode_uuid,
                episode_status=str(episode.state),
                episode_type=episode.episode_type,
                client_uuid=episode.client_uuid,
                latest_activity_timestamp=wall - idle_seconds(episode, now),
                discard_episode_timeout=episode.claim.idle_timeout,
                llm_call_count=len(episode.calls),
                optional_task_id=episode.claim.task_hint,
            )
            for episode in self.controller.pool.running.values()
        ]
        return EpisodeBufferResponse(buffer=buffer)

    async def is_episode_claimed(self, wanted: IsEpisodeClaimedRequest) -> BoolResponse:
        """Whether an episode runs."""
        controller = self.controller
        return BoolResponse(success=controller.has_job and controller.pool.running.get(wanted.episode_uuid) is not None)

    async def get_server_experiment_dir(self) -> ServerExperimentDirResponse:
        """The run folder."""
        folder = str(self.config.run_dir.absolute()) if self.controller.has_job else None
        return ServerExperimentDirResponse(server_experiment_dir=folder)

    async def push_verbose_log(self, wanted: PushVerboseLogRequest) -> SuccessResponse:
        """Show a line in the monitor for half a minute."""
        self.log.push(wanted.tag, wanted.message)
        return SuccessResponse(success=True)

    async def get_verbose_logs(self) -> VerboseLogsResponse:
        """The lines that the monitor shows now."""
        return VerboseLogsResponse(entries=self.log.entries())

    async def trainer(self, request: Request) -> Response:
        """Refused: for AgentJet's own trainer."""
        raise ConflictError(
            f"{request.url.path} is for AgentJet's own trainer; this server drives its engine over a link of its own: "
            "sync a job (POST /sync_train_config) and start it (POST /start_engine)",
            code="foreign_trainer",
        )


def refused(exc: SwarmGatewayError, status: int) -> Response:
    """A refusal in AgentJet's words."""
    body = RefusedResponse(success=False, error=exc.message, code=exc.code or "refused")
    return Response(body.model_dump_json(), status, {"x-should-retry": "false"}, media_type="application/json")


def without_effect(code: Path) -> str:
    """Why synced code changes nothing: AgentJet's client sends the package of its own trainer; empty for other code.

    Raises:
        OSError: it cannot be read.
    """
    if top_level(code) != ["ajet"]:
        return ""
    return (
        "the folder has only `ajet`, AgentJet's own trainer, which nothing here imports: what was changed in it has no "
        "effect. This engine's trainer is verl with the modules in `adapters/verl`"
    )


def late_end(exc: ConflictError) -> Response:
    """The answer to an end without a key of an episode that is over: its client reads a 400 with these words as «go
    on», and every other error as «run the task once more»."""
    body = LateEndResponse(
        success=False,
        error=exc.message,
        code=exc.code or "conflict",
        detail=f"{exc.message} (as in {EngineState.WEIGHT_SYNCING}: an end that comes too late is an abort)",
    )
    return Response(body.model_dump_json(), 400, {"x-should-retry": "false"}, media_type="application/json")


def sees_uuids(request: Request) -> bool:
    """Whether the caller may see the ids of all episodes: whoever knows one, and has any token to claim, may end it."""
    caller: TokenHolder = request.scope["caller"]
    return caller.may("admin")


def pool_information(controller: Controller, *, whole_uuids: bool) -> PoolInformation:
    """The pool's counts and their details, in the shapes of AgentJet's monitor; without a job, the engine's state."""
    status = controller.engine_status()
    if not controller.has_job:
        return PoolInformation(engine_status=str(status.engine_status), global_step=status.global_step)
    job, pool = controller.job, controller.pool
    waiting = list(pool.collection.groups.waiting())
    details: dict[str, list[str]] = {}
    rewards: dict[str, list[float]] = {}
    clients: dict[str, list[str]] = {}
    non_dummy = 0
    for group in waiting:
        own = [member.trajectory.reward for member in group.members]
        details.setdefault(group.task_id, []).extend(
            shown_uuid(member.trajectory.episode_uuid, whole_uuids) for member in group.members
        )
        rewards.setdefault(group.task_id, []).extend(own)
        clients.setdefault(group.task_id, []).extend(group.clients)
        non_dummy += len(own) >= job.num_repeat and len(set(own)) > 1
    now = time.monotonic()
    running = {
        shown_uuid(episode.episode_uuid, whole_uuids): _running_details(episode, now)
        for episode in pool.running.values()
    }
    booting = status.engine_status is EngineState.BOOTING
    return pool.information().model_copy(
        update={
            "sample_collection_method": f"rollout_until_{job.collection}",
            "completed_episode_target": job.batch_size * job.num_repeat,
            "completed_task_target": job.batch_size,
            "completed_non_dummy_tasks": non_dummy,
            "completed_non_dummy_task_target": job.batch_size,
            "task_expected_num_repeat": job.num_repeat,
            "completed_tasks_details": details,
            "completed_tasks_rewards": rewards,
            "completed_tasks_client_uuids": clients,
            # its client reads null, not an empty mapping, as «none runs»
            "running_episode_details": running or None,
            "engine_status": str(status.engine_status),
            "global_step": status.global_step,
            "booting_start_time": time.time() - controller.engine.seconds_in_state if booting else None,
            "swarm_client_instruction": SwarmClientInstruction(active_clients=_active_clients(controller)),
            "training_model_path": job.model,
        }
    )


def _active_clients(controller: Controller) -> list[ActiveSwarmClient]:
    now = time.time()
    return [
        ActiveSwarmClient(
            client_uuid=row.client_uuid, last_activity_at=now - row.idle_seconds, allowed_sync_weight=row.agreed
        )
        for row in controller.pool.collection.rows()
        if row.active and row.takes_part
    ]


def _running_details(episode: LiveEpisode, now: float) -> dict[str, str]:
    # its client's model takes only strings here
    return {
        "episode_status": str(episode.state),
        "time_since_last_activity": f"{idle_seconds(episode, now):.1f}s",
        "discard_episode_timeout": f"{episode.claim.idle_timeout:.1f}s",
        "llm_call_count": str(len(episode.calls)),
        "client_uuid": episode.client_uuid,
        "optional_task_id": episode.claim.task_hint,
    }
