"""Rows with small content, made from a few words."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from swarm.server.episodes.timelines import merge_calls
from swarm.server.journal.rows import BatchRow, CallRow, EndedHow, EndRow, EpisodeRow, JournalRow, StateRow, StepRow
from swarm.states import EpisodeState
from swarm.tokens import TrainBatch, TrainGroup, Trajectory
from swarm.types import StepResult, WorkflowOutput
from tests.token_data import model_call, timeline
from tests.token_data import trajectory as made_trajectory


def claimed(uuid: str, client: str = "c", **fields: Any) -> EpisodeRow:
    given: dict[str, Any] = {"episode_type": "train", "key_digest": b"k" * 32, **fields}
    return EpisodeRow(uuid, client, idle_timeout=240.0, max_seconds=600.0, claimed_at=1.5e9, **given)


def call(uuid: str, call_id: str, tokens: int = 3) -> CallRow:
    return CallRow(
        uuid,
        model_call(
            range(5), range(100, 100 + tokens), 1, 2, call_id=call_id, logprobs=[-1 / 3 - k for k in range(tokens)]
        ),
    )


def trajectory(uuid: str, task_id: str = "t", reward: float = 1.0, tokens: int = 3) -> Trajectory:
    mask, logprobs = [k % 2 for k in range(tokens)], [-0.1 * k for k in range(tokens)]
    line = timeline([1, 2, 70_000], range(tokens), 3, 4, response_mask=mask, logprobs=logprobs)
    metrics = {"length": 0.1, "ä": float("inf")}
    return made_trajectory(line, episode_uuid=uuid, task_id=task_id, reward=reward, log_metrics=metrics)


def ended(uuid: str, task_id: str = "t", tokens: int = 3, client: str = "c", **fields: Any) -> EndRow:
    """A train episode that waits for a batch."""
    given: dict[str, Any] = {
        "output": WorkflowOutput(reward=1.0, metadata={"answer": "yes"}),
        "end_key": f"end-{uuid}",
        "trajectory": trajectory(uuid, task_id, tokens=tokens),
    }
    return EndRow(uuid, client, EpisodeState.FINISHED, "ended", 1.6e9, task_id, **given | fields)


def ended_with(row: CallRow, task_id: str = "t", **fields: Any) -> EndRow:
    """A train episode that waits for a batch with the tokens of this call."""
    call = row.call
    given = structs.replace(trajectory(row.episode_uuid, task_id), timelines=merge_calls([call]))
    return ended(row.episode_uuid, task_id, trajectory=given, kept_call=call.call_id, **fields)


def refused(uuid: str, reason: str = "no call", client: str = "c") -> EndRow:
    """A train episode that ended but is not trained."""
    return EndRow(uuid, client, EpisodeState.DROPPED, "ended", 1.6e9, "t", WorkflowOutput(reward=0.0), reason)


def over(uuid: str, how: EndedHow = "ended", at: float = 1.6e9, client: str = "c", **fields: Any) -> EndRow:
    """An episode that ended with nothing to train."""
    return EndRow(uuid, client, EpisodeState.DELETED, how, at, **fields)


def dropped(*uuids: str, reason: str = "stale") -> StateRow:
    return StateRow(uuids, EpisodeState.DROPPED, reason=reason)


def batch(batch_id: str, **tasks: list[str]) -> TrainBatch:
    groups = [
        TrainGroup(task_id=task, trajectories=[trajectory(u, task) for u in uuids]) for task, uuids in tasks.items()
    ]
    return TrainBatch(batch_id=batch_id, groups=groups)


def taken(batch: TrainBatch) -> tuple[JournalRow, ...]:
    """The batch goes out."""
    return BatchRow(batch), StateRow(uuids(batch), EpisodeState.BATCHED, batch.batch_id)


def stepped(batch: TrainBatch, number: int = 1, run_id: str = "r") -> tuple[JournalRow, ...]:
    """The step of the batch is recorded."""
    result = StepResult(step=number, batch_id=batch.batch_id, metrics={"loss": float("inf")}, seconds=2.5)
    return StepRow(run_id, result), StateRow(uuids(batch), EpisodeState.TRAINED, step=number)


def uuids(batch: TrainBatch) -> list[str]:
    return [one.episode_uuid for group in batch.groups for one in group.trajectories]
