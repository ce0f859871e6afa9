"""The pool of the current batch and the running episodes, as AgentJet's client and monitor read them, and our client
with them.

Invariant: it reads, and changes nothing.
"""

from __future__ import annotations

import time

from swarm.server.engine.controller import Controller
from swarm.server.episodes.episode import LiveEpisode
from swarm.server.monitor import idle_seconds, shown_uuid
from swarm.states import EngineState
from swarm.status import (
    ActiveSwarmClient,
    BufferedEpisode,
    EpisodeBufferResponse,
    PoolInformation,
    SwarmClientInstruction,
)


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


def episode_buffer(controller: Controller) -> EpisodeBufferResponse:
    """The running episodes."""
    if not controller.has_job:
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
        for episode in controller.pool.running.values()
    ]
    return EpisodeBufferResponse(buffer=buffer)


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
