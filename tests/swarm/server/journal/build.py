"""Records with small content, made from a few words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import structs

from swarm.server.journal.records import CallRecorded, EpisodeClaimed, EpisodeEnded, StepRecorded
from swarm.tokens import ModelCall, Timeline, TrainBatch, TrainGroup, Trajectory
from swarm.tracker.timelines import merge_calls
from swarm.types import StepResult, WorkflowOutput


def claimed(uuid: str, client: str = "c", **fields: Any) -> EpisodeClaimed:
    given: dict[str, Any] = {"episode_type": "train", "key_digest": b"k" * 32, **fields}
    return EpisodeClaimed(uuid, client, idle_timeout=240.0, max_seconds=600.0, claimed_at=1.5e9, **given)


def call(uuid: str, call_id: str, tokens: int = 3) -> CallRecorded:
    return CallRecorded(
        uuid,
        ModelCall(
            call_id=call_id,
            prompt_ids=list(range(5)),
            response_ids=list(range(100, 100 + tokens)),
            logprobs=[-1 / 3 - k for k in range(tokens)],
            min_policy_version=1,
            max_policy_version=2,
            finish_reason="stop",
        ),
    )


def trajectory(uuid: str, task_id: str = "t", reward: float = 1.0, tokens: int = 3) -> Trajectory:
    timeline = Timeline(
        prompt_ids=[1, 2, 70_000],
        response_ids=list(range(tokens)),
        response_mask=[k % 2 for k in range(tokens)],
        logprobs=[-0.1 * k for k in range(tokens)],
        min_policy_version=3,
        max_policy_version=4,
        num_calls=1,
    )
    return Trajectory(
        episode_uuid=uuid,
        task_id=task_id,
        reward=reward,
        timelines=[timeline],
        num_calls=1,
        log_metrics={"length": 0.1, "ä": float("inf")},
    )


def ended(uuid: str, task_id: str = "t", tokens: int = 3, client: str = "c", **fields: Any) -> EpisodeEnded:
    """A train episode that waits for a batch."""
    output = WorkflowOutput(reward=1.0, metadata={"answer": "yes"})
    given: dict[str, Any] = {"end_key": f"end-{uuid}", **fields}
    return EpisodeEnded(
        uuid, client, "ended", 1.6e9, task_id, output, trajectory=trajectory(uuid, task_id, tokens=tokens), **given
    )


def ended_with(record: CallRecorded, task_id: str = "t", **fields: Any) -> EpisodeEnded:
    """A train episode that waits for a batch with the tokens of this call, as far as it knows its only one."""
    call = record.call
    end = ended(record.episode_uuid, task_id, **fields)
    assert end.trajectory is not None
    timelines = merge_calls([call])
    return replace(end, trajectory=structs.replace(end.trajectory, timelines=timelines))


def refused(uuid: str, reason: str = "no call", client: str = "c") -> EpisodeEnded:
    """A train episode that ended but is not trained."""
    return EpisodeEnded(uuid, client, "ended", 1.6e9, "t", WorkflowOutput(reward=0.0), reason)


def batch(batch_id: str, **tasks: list[str]) -> TrainBatch:
    groups = [
        TrainGroup(task_id=task, trajectories=[trajectory(u, task) for u in uuids]) for task, uuids in tasks.items()
    ]
    return TrainBatch(batch_id=batch_id, groups=groups)


def step(batch_id: str, number: int = 1) -> StepRecorded:
    return StepRecorded(StepResult(step=number, batch_id=batch_id, metrics={"loss": float("inf")}, seconds=2.5))
