"""Routes that only AgentJet's clients and monitors ask for, and those of its trainer.

Invariant: the names of other callers' episodes are told in full only to callers that may do anything (see
:func:`sees_uuids`); what belongs to AgentJet's own trainer is refused and changes nothing.

AgentJet's trainer registers episodes and reports its state over HTTP. The engine here is driven by this server over its
own link (:mod:`swarm.link`), and episodes are made when they are claimed, so a trainer of AgentJet's cannot be plugged
in: an answer of success would let it wait for ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarm.errors import ConflictError
from swarm.http.asgi import read_model
from swarm.protocol import (
    ActiveSwarmClient,
    BoolResponse,
    BufferedEpisode,
    EngineStatus,
    EpisodeBufferResponse,
    IsEpisodeClaimedRequest,
    PoolInformation,
    PushVerboseLogRequest,
    ServerExperimentDirResponse,
    SuccessResponse,
    SwarmClientInstruction,
    VerboseLogsResponse,
)
from swarm.server.api.responses import answer
from swarm.server.auth import Caller
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.episodes.episode import Episode
from swarm.server.monitor import VerboseLog, idle_seconds, shown_uuid
from swarm.states import EngineState

#: Its clients of March and April 2026 keep for 0.5 s what they were told of the engine's state.
REMEMBERED_SECONDS = 0.6
#: Its clients look each 5 s, at a state that is a moment old, whether the sync that they agreed to has begun.
SHOWN_SECONDS = 7.0

#: Paths that AgentJet's trainer posts to.
TRAINER_PATHS = (
    "/register_episode",
    "/update_engine_status",
    "/update_current_batch_rollout_pool_information",
    "/update_current_batch_rollout_pool_information_and_fetch_instruction",
)


class StateShown:
    """The engine's state as AgentJet's clients must be told it (``/get_engine_status``), for they look at it seldom.

    A sync that clients agreed to is shown for :data:`SHOWN_SECONDS` after its end, though the engine may roll again, or
    be done: else a client that agreed would wait for ever. Who takes it for true only claims later.
    """

    def __init__(self, controller: Controller, clock: Callable[[], float] = time.monotonic) -> None:
        self._controller = controller
        self._clock = clock
        self._offline_told = -math.inf

    def status(self) -> EngineStatus:
        status = self._controller.engine_status()
        boots = status.engine_status is EngineState.BOOTING
        if not boots and self._clock() - self._controller.agreement_over < SHOWN_SECONDS:
            return status.model_copy(update={"engine_status": EngineState.WEIGHT_SYNCING})
        if status.engine_status is EngineState.OFFLINE:
            self._offline_told = self._clock()
        return status

    def until_forgotten(self) -> float:
        """Seconds until no client takes the engine for OFFLINE any more because it was told so before."""
        return max(0.0, self._offline_told + REMEMBERED_SECONDS - self._clock())


@dataclass(frozen=True)
class AgentJetRoutes:
    """What AgentJet's client asks beside claims and ends."""

    config: ServerConfig
    controller: Controller
    log: VerboseLog

    def routes(self) -> list[Route]:
        return [
            Route("/get_current_batch_rollout_pool_information", self.pool_information, methods=["GET"]),
            Route("/get_episode_buffer", self.get_episode_buffer, methods=["POST"]),
            Route("/is_episode_claimed", self.is_episode_claimed, methods=["POST"]),
            Route("/get_server_experiment_dir", self.get_server_experiment_dir, methods=["GET"]),
            Route("/push_verbose_log", self.push_verbose_log, methods=["POST"]),
            Route("/get_verbose_logs", self.get_verbose_logs, methods=["GET"]),
            *(Route(path, self.trainer, methods=["POST"]) for path in TRAINER_PATHS),
        ]

    async def pool_information(self, request: Request) -> Response:
        return answer(pool_information(self.controller, whole_uuids=sees_uuids(request)))

    async def get_episode_buffer(self, request: Request) -> Response:
        if not self.controller.has_job:
            return answer(EpisodeBufferResponse(buffer=[]))
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
            for episode in self.controller.pool.episodes
        ]
        return answer(EpisodeBufferResponse(buffer=buffer))

    async def is_episode_claimed(self, request: Request) -> Response:
        wanted = await read_model(request, IsEpisodeClaimedRequest, self.config.max_body_bytes)
        claimed = self.controller.has_job and self.controller.pool.is_running(wanted.episode_uuid)
        return answer(BoolResponse(success=claimed))

    async def get_server_experiment_dir(self, request: Request) -> Response:
        folder = str(self.config.run_dir.absolute()) if self.controller.has_job else None
        return answer(ServerExperimentDirResponse(server_experiment_dir=folder))

    async def push_verbose_log(self, request: Request) -> Response:
        wanted = await read_model(request, PushVerboseLogRequest, self.config.max_body_bytes)
        self.log.push(wanted.tag, wanted.message)
        return answer(SuccessResponse(success=True))

    async def get_verbose_logs(self, request: Request) -> Response:
        return answer(VerboseLogsResponse(entries=self.log.entries()))

    async def trainer(self, request: Request) -> Response:
        raise ConflictError(
            f"{request.url.path} is for AgentJet's own trainer; this server drives its engine over a link of its own: "
            "sync a job (POST /sync_train_config) and start it (POST /start_engine)",
            code="foreign_trainer",
        )


def sees_uuids(request: Request) -> bool:
    """Whether the caller may know the names of all episodes: whoever knows one and has a token to claim, this one or
    another, may end it."""
    caller: Caller = request.scope["caller"]
    return caller.may("admin")


def pool_information(controller: Controller, *, whole_uuids: bool) -> PoolInformation:
    """The pool's counts and, in the shapes of AgentJet's monitor, what is behind them; before a job there are none."""
    status = controller.engine_status()
    if not controller.has_job:
        return PoolInformation(engine_status=str(status.engine_status), global_step=status.global_step)
    job, pool = controller.job, controller.pool
    waiting = list(pool.collection.waiting())
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
    running = {shown_uuid(one.episode_uuid, whole_uuids): _running_details(one, now) for one in pool.episodes}
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
            # its client takes null, not an empty mapping, as «none runs»
            "running_episode_details": running or None,
            "engine_status": str(status.engine_status),
            "global_step": status.global_step,
            "booting_start_time": time.time() - controller.seconds_in_state if booting else None,
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


def _running_details(episode: Episode, now: float) -> dict[str, str]:
    # its client's model takes nothing but strings here
    return {
        "episode_status": str(episode.state),
        "time_since_last_activity": f"{idle_seconds(episode, now):.1f}s",
        "discard_episode_timeout": f"{episode.claim.idle_timeout:.1f}s",
        "llm_call_count": str(len(episode.calls)),
        "client_uuid": episode.client_uuid,
        "optional_task_id": episode.claim.task_hint,
    }
