"""From a batch of the swarm to the rows that verl's trainer reads from its TransferQueue.

Invariant: every token id, mask bit and log-probability of a timeline arrives in the trainer unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.tokens import Timeline, TrainBatch, Trajectory


@dataclass(frozen=True)
class Rows:
    """Rows of one group: ``keys[i]`` is ``{uid}_{session}_{index}``, with its tensors, its tag, and the reward and the
    credit of its episode."""

    uid: str
    keys: list[str]
    fields: list[dict[str, Any]]
    tags: list[dict[str, Any]]
    rewards: list[float]
    credits: list[float]


def batch_rows(batch: TrainBatch, uids: Sequence[str], step: int) -> list[Rows]:
    """The rows of ``batch``, one :class:`Rows` per group, group ``i`` under the trainer's ``uids[i]``.

    Args:
        batch: the groups may have different numbers of trajectories.
        uids: names for the groups of this step, one each.
        step: the training step that consumes the rows.

    Raises:
        ValueError: a trajectory holds no sampled token.
    """
    rows: list[Rows] = []
    for uid, group in zip(uids, batch.groups, strict=True):
        group_rows = Rows(uid, [], [], [], [], [])
        for session, trajectory in enumerate(group.trajectories):
            for index, timeline in enumerate(_sampled(trajectory)):
                group_rows.keys.append(f"{uid}_{session}_{index}")
                group_rows.fields.append(timeline_fields(timeline, uid=uid, reward=trajectory.reward))
                group_rows.tags.append(timeline_tag(timeline, step=step))
                group_rows.rewards.append(trajectory.reward)
                group_rows.credits.append(trajectory.credit)
        rows.append(group_rows)
    return rows


def _sampled(trajectory: Trajectory) -> list[Timeline]:
    # verl reads a trajectory's advantage at the first sampled token of its last timeline; without one it would be 0
    timelines = [timeline for timeline in trajectory.timelines if timeline.sampled_tokens]
    if not timelines:
        raise ValueError(f"episode {trajectory.episode_uuid} has no token that the policy sampled")
    return timelines


def timeline_fields(timeline: Timeline, *, uid: str, reward: float) -> dict[str, Any]:
    """One row of verl's.

    ``prompts`` int64 [P], ``responses`` int64 [R], ``input_ids`` and ``position_ids`` int64 [P+R], ``response_mask``
    and ``loss_mask`` int64 [R], ``rollout_log_probs`` and ``rm_scores`` float32 [R] (the reward on the last token),
    ``policy_versions`` int64 [R] (the training steps whose weights sampled the tokens).
    """
    prompts = torch.tensor(timeline.prompt_ids, dtype=torch.int64)
    responses = torch.tensor(timeline.response_ids, dtype=torch.int64)
    mask = torch.tensor(timeline.response_mask, dtype=torch.int64)
    input_ids = torch.cat([prompts, responses])
    scores = torch.zeros(len(responses), dtype=torch.float32)
    scores[-1] = reward
    return {
        "uid": uid,
        "prompts": prompts,
        "responses": responses,
        "input_ids": input_ids,
        "position_ids": torch.arange(len(input_ids)),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": torch.tensor(timeline.logprobs, dtype=torch.float32),
        "rm_scores": scores,
        "policy_versions": torch.tensor(timeline.token_versions(), dtype=torch.int64),
        "num_turns": timeline.num_calls,
        # the data plane quarantines conversations that hold anything but text
        "multi_modal_inputs": {},
        "extra_fields": {"reward_extra_info": {}},
        "data_source": "swarm",
        "reward_model": {"ground_truth": None},
    }


def timeline_tag(timeline: Timeline, *, step: int) -> dict[str, Any]:
    """The metadata by which verl balances and ages rows; lengths in tokens, versions in training steps."""
    prompt_len, response_len = len(timeline.prompt_ids), len(timeline.response_ids)
    return {
        "status": "success",
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "global_steps": step,
        "min_global_steps": timeline.min_policy_version,
        "max_global_steps": timeline.max_policy_version,
    }
