"""What the server does for AgentJet's clients: routes that only they and their monitors use, those of its trainer, and
answers in AgentJet's words.

Invariant: names of other callers' episodes are given in full only to callers that may do anything; requests of
AgentJet's own trainer are refused and change nothing: answered with success, it would wait for ever for a server that
drives its engine over a link of its own (:mod:`swarm.link`).
"""

from __future__ import annotations

import math
import secrets
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from adapters.dialects import ChatDialect
from swarm.errors import ConflictError, ContextLengthError
from swarm.job import TrainJob
from swarm.link.imported import top_level
from swarm.protocol import BoolResponse, LateEndResponse, Name, SuccessResponse, WireRequest
from swarm.server.auth import ControlRoute, TokenHolder
from swarm.server.dataplane.calls import CallOwner
from swarm.server.episodes.episode import LiveEpisode
from swarm.server.foreign import ForeignClients
from swarm.server.monitor import idle_seconds, shown_uuid
from swarm.states import EngineState, EpisodeState
from swarm.status import (
    ActiveSwarmClient,
    BufferedEpisode,
    EngineStatus,
    EpisodeBufferResponse,
    LogEntry,
    PoolInformation,
    SwarmClientInstruction,
)
from swarm.types import Model

#: Its clients of March and April 2026 cache the engine's state for 0.5 s.
REMEMBERED_SECONDS = 0.6
#: Every 5 s its clients check, in a slightly old state, whether the sync that they agreed to has begun.
SHOWN_SECONDS = 7.0

#: How long a claim waits for the next batch to open: refused, its clients would sleep for 15 s. They give a request up
#: after 30 s.
HELD_SECONDS = 20.0

#: what its agents look for
SIGNATURE = "AgentJet: Exceeded max model context length. token_overflow"

#: Paths that AgentJet's trainer posts to.
TRAINER_PATHS = (
    "/register_episode",
    "/update_engine_status",
    "/update_current_batch_rollout_pool_information",
    "/update_current_batch_rollout_pool_information_and_fetch_instruction",
)


class IsEpisodeClaimedRequest(WireRequest):
    """``POST /is_episode_claimed``; whether it is to be unregistered otherwise is AgentJet's trainer's business."""

    episode_uuid: Name


class ServerExperimentDirResponse(Model):
    """``GET /get_server_experiment_dir``: where the server keeps the run; null before a job is synced."""

    server_experiment_dir: str | None


class PushVerboseLogRequest(WireRequest):
    """``POST /push_verbose_log``: a line for the monitor; long ones are cut."""

    tag: str = ""
    message: str


class VerboseLogsResponse(Model):
    """``GET /get_verbose_logs``: the lines pushed within the last half minute, oldest first."""

    entries: list[LogEntry]


class AgentJetClients(ForeignClients):
    """What AgentJet's client needs beside claims and ends."""

    held_seconds = HELD_SECONDS

    clock = staticmethod(time.monotonic)
    _offline_told = -math.inf

    def status(self) -> EngineStatus:
        """The engine's state as AgentJet's clients must see it (``/get_engine_status``), because they poll it rarely.

        A sync that clients agreed to is shown for :data:`SHOWN_SECONDS` after its end, even if the engine rolls again
        or is done: otherwise a client that agreed would wait for ever. Whoever believes it merely claims later.
        """
        status = self.controller.engine_status()
        boots = status.engine_status is EngineState.BOOTING
        if not boots and self.clock() - self.controller.episodes.agreement_over < SHOWN_SECONDS:
            shown = EngineState.WEIGHT_SYNCING
            detail = status.engine_status_detail
            if status.engine_status is not shown:
                detail = f"the sync that clients agreed to is over; the engine is {status.engine_status}: {detail}"
            return status.model_copy(update={"engine_status": shown, "engine_status_detail": detail})
        if status.engine_status is EngineState.OFFLINE:
            self._offline_told = self.clock()
        return status

    def until_forgotten(self) -> float:
        """Seconds until no client still has OFFLINE in its cache."""
        return max(0.0, self._offline_told + REMEMBERED_SECONDS - self.clock())

    def without_effect(self, code: Path) -> str:
        """AgentJet's client sends the package of its own trainer."""
        if top_level(code) != ["ajet"]:
            return ""
        return (
            "the folder has only `ajet`, AgentJet's own trainer, which nothing here imports: what was changed in it "
            "has no effect. This engine's trainer is verl with the modules in `adapters/verl`"
        )

    def late_end(self, error: ConflictError) -> Response:
        """Its client reads a 400 with these words as «go on», and every other error as «run the task once more»."""
        body = LateEndResponse(
            success=False,
            error=error.message,
            code=error.code or "conflict",
            detail=f"{error.message} (as in {EngineState.WEIGHT_SYNCING}: an end that comes too late is an abort)",
        )
        return Response(body.model_dump_json(), 400, {"x-should-retry": "false"}, media_type="application/json")

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
        caller: TokenHolder = request.scope["caller"]
        controller = self.controller
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
                shown_uuid(member.trajectory.episode_uuid, caller.sees_uuids) for member in group.members
            )
            rewards.setdefault(group.task_id, []).extend(own)
            clients.setdefault(group.task_id, []).extend(group.clients)
            non_dummy += len(own) >= job.num_repeat and len(set(own)) > 1
        now = time.monotonic()
        running = {
            shown_uuid(episode.episode_uuid, caller.sees_uuids): _running_details(episode, now)
            for episode in pool.running.values()
        }
        clients_now = [
            ActiveSwarmClient(
                client_uuid=row.client_uuid,
                last_activity_at=time.time() - row.idle_seconds,
                allowed_sync_weight=row.agreed,
            )
            for row in pool.collection.rows()
            if row.active and row.takes_part
        ]
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
                "swarm_client_instruction": SwarmClientInstruction(active_clients=clients_now),
                "training_model_path": job.model,
            }
        )

    async def get_episode_buffer(self) -> EpisodeBufferResponse:
        """The running episodes."""
        controller = self.controller
        if not controller.has_job:
            return EpisodeBufferResponse(buffer=[])
        wall, now = time.time(), time.monotonic()
        buffer = [
            BufferedEpisode(
                episode_uuid=episode.episode_uuid,
                episode_status=EpisodeState.CLAIMED.value,
                episode_type=episode.episode_type,
                client_uuid=episode.client_uuid,
                latest_activity_timestamp=wall - idle_seconds(episode, now),
                discard_episode_timeout=episode.claim.idle_timeout,
                llm_call_count=len(episode.calls),
                optional_task_id=episode.claim.task_hint,
            )
            for episode in controller.pool.running.values()
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


def overflow_answer(error: ContextLengthError, job: TrainJob, owner: CallOwner) -> dict[str, Any] | None:
    """The chat completion in place of ``error`` to a call of an episode, for jobs in AgentJet's form.

    An agent written for AgentJet is told by an answer, not by an error, that its conversation has become too long: it
    looks for :data:`SIGNATURE` in it, and ends the episode with the reward that it has earned by then. A group, whose
    answer may go to a user of the gateway, is never answered so. Nothing of such an answer was sampled or is recorded.
    """
    if job.dialect != "agentjet" or len(owner.episodes) != 1 or owner.episodes[0].claim.group_uuid:
        return None
    prompt = int(error.body()["error"]["prompt_tokens"])
    words = (
        f"{SIGNATURE}(prompt_token_length.{prompt}>=max_model_len.{job.max_model_len}"
        f"-max_response_length_in_one_turn.{job.max_turn_length or 0})"
    )
    return {
        "id": f"{ChatDialect.id_prefix}{secrets.token_hex(16)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": job.model_name,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": words},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt},
    }


def _running_details(episode: LiveEpisode, now: float) -> dict[str, str]:
    # its client's model takes only strings here
    return {
        "episode_status": EpisodeState.CLAIMED.value,
        "time_since_last_activity": f"{idle_seconds(episode, now):.1f}s",
        "discard_episode_timeout": f"{episode.claim.idle_timeout:.1f}s",
        "llm_call_count": str(len(episode.calls)),
        "client_uuid": episode.client_uuid,
        "optional_task_id": episode.claim.task_hint,
    }
