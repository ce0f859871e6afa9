"""What of a finished episode is trained.

Invariant: a trajectory holds exactly the tokens that were recorded, or there is none and a reason says why.
"""

from __future__ import annotations

from swarm.server.episodes.episode import Episode
from swarm.tokens import Trajectory
from swarm.tracker.timelines import merge_calls
from swarm.types import WorkflowOutput


def trajectory_of(episode: Episode, task_id: str, output: WorkflowOutput) -> Trajectory | str:
    """What is to be trained of a train episode that ends with ``output``, or why nothing is."""
    if episode.quarantine_reason:
        return f"quarantined: {episode.quarantine_reason}"
    timelines = merge_calls(episode.calls)
    if not timelines:
        return "no completed LLM call was recorded in the episode"
    try:
        return Trajectory(
            episode_uuid=episode.episode_uuid,
            task_id=task_id,
            reward=output.reward,
            timelines=timelines,
            num_calls=len(episode.calls),
            log_metrics=output.log_metrics,
        )
    except ValueError as exc:
        return f"invalid trajectory: {exc}"
