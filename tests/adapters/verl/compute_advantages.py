"""Advantages by verl's real trainer code; importing it takes seconds, so tests do it where they need it.

Only the TransferQueue is a stand-in: a dict of columns.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import compute_rloo_outcome_advantage
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from adapters.verl.config import verl_config
from adapters.verl.feed import batch_rows
from adapters.verl.trainer import SwarmTrainer
from swarm.job import TrainJob
from swarm.tokens import TrainBatch, TrainGroup, Trajectory
from tests.token_data import timeline

# a tool's token in between: no advantage there
MASK = [1, 0, 1]
LINE = timeline([1, 2], [3, 4, 5], response_mask=MASK)


def make_batch(groups: list[list[dict[str, Any]]]) -> TrainBatch:
    return TrainBatch(
        batch_id="b",
        groups=[
            TrainGroup(
                task_id=str(number),
                trajectories=[
                    Trajectory(
                        episode_uuid=f"{number}-{index}",
                        task_id=str(number),
                        reward=episode["reward"],
                        credit=episode.get("credit", 0.0),
                        timelines=[LINE] * episode["timelines"],
                        num_calls=1,
                    )
                    for index, episode in enumerate(group)
                ],
            )
            for number, group in enumerate(groups)
        ],
    )


class Store:
    """The rows of one batch, as the TransferQueue would keep them."""

    def __init__(self, fields: list[dict[str, Any]]) -> None:
        # the step before this one has computed the old log-probabilities
        rows = [{**row, "old_log_probs": row["rollout_log_probs"]} for row in fields]
        self.rows = list_of_dict_to_tensordict(rows)

    def get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        rows = self.rows.select(*select_fields, strict=False)
        for name, column in rows.items():
            # the TransferQueue's columns are ragged, also where all rows have one length
            if isinstance(column, torch.Tensor) and not column.is_nested:
                rows[name] = torch.nested.as_nested_tensor(list(column.unbind()), layout=torch.jagged)
        return rows

    def put(self, keys: list[str], partition_id: str, fields: Any) -> KVBatchMeta:
        self.rows.update(fields)
        return KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id=partition_id)


def trainer_of(config: Any, rewards: dict[str, float], credits: dict[str, float]) -> SwarmTrainer:
    """A trainer with its configuration, and rewards and credits of its rows: no model, no workers."""
    trainer = SwarmTrainer.__new__(SwarmTrainer)
    base = SwarmTrainer.__mro__[1]
    # the first lines of __init__ are what is tested; the rest needs a cluster
    original = base.__init__
    base.__init__ = lambda self, config: setattr(self, "config", config)
    try:
        feed = SimpleNamespace(rewards=rewards, credits=credits)
        SwarmTrainer.__init__(trainer, config, SimpleNamespace(), feed, Path(), False)  # type: ignore[arg-type]
    finally:
        base.__init__ = original
    return trainer


def advantages(case: dict[str, Any]) -> list[list[list[list[float]]]]:
    """The advantages per group, episode and timeline, each with its token advantages.

    Args:
        case: ``{"advantage": ..., "groups": [[{"reward": ..., "timelines": n}, ...], ...]}``, perhaps with an
            ``estimator`` of verl's in place of the job's.
    """
    batch = make_batch(case["groups"])
    rows = batch_rows(batch, [f"uid{number}" for number in range(len(batch.groups))], 1)
    keys = [key for group in rows for key in group.keys]
    store = Store([fields for group in rows for fields in group.fields])
    meta = KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train")
    overrides = {"algorithm.adv_estimator": case["estimator"]} if "estimator" in case else {}
    fields = {"model": "m", "advantage": case["advantage"], "device": "cpu", "overrides": overrides}
    job = TrainJob.model_validate(fields)
    config = verl_config(job, "m", Path(tempfile.gettempdir()), "cpu")
    rewards = {key: reward for group in rows for key, reward in zip(group.keys, group.rewards, strict=True)}
    credits = {key: credit for group in rows for key, credit in zip(group.keys, group.credits, strict=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tq, "kv_batch_get", store.get)
        patch.setattr(tq, "kv_batch_put", store.put)
        trainer_of(config, rewards, credits)._compute_advantage(meta, metrics={})
    found: list[list[list[list[float]]]] = [[[] for _ in group] for group in case["groups"]]
    for key, row in zip(keys, store.rows["advantages"].unbind(), strict=True):
        uid, episode, _ = key.rsplit("_", 2)
        found[int(uid.removeprefix("uid"))][int(episode)].append(row.tolist())
    return found


def verls_own_rloo(rewards: list[float]) -> list[float]:
    """What verl's estimator says of a group with one timeline per episode."""
    scores = torch.tensor([[reward] for reward in rewards])
    index = np.array(["u"] * len(rewards), dtype=object)
    return compute_rloo_outcome_advantage(scores, torch.ones_like(scores), index)[0][:, 0].tolist()
