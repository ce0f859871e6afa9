"""What the server itself measures of a batch; the trainer measures the rest."""

from __future__ import annotations

import statistics

from swarm.tokens import TrainBatch


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Our metrics of one batch: rewards over all its episodes (population deviation), tokens sampled per episode."""
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    rewards = [trajectory.reward for trajectory in trajectories]
    tokens = [trajectory.sampled_tokens for trajectory in trajectories]
    return {
        "swarm/reward_mean": statistics.fmean(rewards),
        "swarm/reward_std": statistics.pstdev(rewards),
        "swarm/episodes": float(len(trajectories)),
        "swarm/tasks": float(len(batch.groups)),
        "swarm/response_tokens_mean": statistics.fmean(tokens),
    }
