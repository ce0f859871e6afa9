"""From the rewards of a group to the advantages of its tokens, with episodes as the unit.

Invariant: an episode counts once in its group, however many timelines it has; by its reward a group of one episode, or
of equal rewards, has advantage 0 and so no gradient.

With rewards ``r_1 .. r_N`` of the N episodes of a group, every sampled token of episode i has the advantage

``grpo``
    ``(r_i - mean) / (std + 1e-6)``, the standard deviation with ``N - 1``. DeepSeekMath (Shao et al. 2024,
    arXiv:2402.03300, section 4.1.2). Groups in which rewards differ little weigh as much as those in which they differ
    much. The loss is the mean over the tokens of the mini-batch, as in DAPO (Yu et al. 2025, arXiv:2503.14476).
``dr_grpo``
    ``r_i - mean``, and the loss is the sum over a timeline's tokens, over ``max_response_length``, in the mean over
    timelines. "Understanding R1-Zero-Like Training" (Liu et al. 2025, arXiv:2503.20783, section 3): dividing by the
    deviation favours questions that are too easy or too hard, dividing by the length favours long wrong answers.
``rloo``
    ``r_i - sum of the others / (N - 1)``, which is ``(r_i - mean) * N / (N - 1)``. "Back to Basics" (Ahmadian et al.
    2024, arXiv:2402.14740, section 2.2; Kool et al. 2019). Unbiased: the baseline does not depend on the answer.

To that comes the episode's ``credit``, an advantage that the gateway has worked out for an answer that was delivered
(``gateway/sessions/credit.py``): its part in the outcome of the session, as GiGPO (Feng et al. 2025, arXiv:2505.10978)
adds the advantages of episodes and steps. Also in a group of one, which has no other.

verl (0.9.1) computes GRPO from one row per episode and copies the result to the others, but any other estimator from
all rows: its own ``rloo`` would count an episode of three timelines three times. It also takes the mean of a group of
one as 0, so that such an episode would be trained on its bare reward. And in a group whose rewards are equal, what its
mean is rounded by is over a deviation of the same size: up to 0.06 for rewards of 0.9, and near 1 for those of some
hundreds. All are put right by a factor on its result.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from swarm.job import TrainJob

#: verl's names of estimators.
GRPO, RLOO = "grpo", "rloo"

_FIELDS = ("advantages", "returns")


def advantage_values(job: TrainJob) -> dict[str, Any]:
    """What ``job.advantage`` means to verl, as dotted keys."""
    values: dict[str, Any] = {
        "algorithm.adv_estimator": RLOO if job.advantage == "rloo" else GRPO,
        "algorithm.norm_adv_by_std_in_grpo": job.advantage == "grpo",
    }
    if job.advantage == "dr_grpo":
        # a constant: verl's default, the longest response of the micro-batch, would change from one to the next
        values["actor_rollout_ref.actor.loss_agg_mode"] = "seq-mean-token-sum-norm"
        values["actor_rollout_ref.actor.loss_scale_factor"] = job.max_response_length
    return values


def episode_factors(keys: Sequence[str], rewards: Sequence[float] | None, *, leave_one_out: bool) -> list[float]:
    """What verl's group-relative advantages are to be multiplied with, for each row.

    Args:
        keys: verl's keys of the rows, ``{uid}_{session}_{index}``.
        rewards: of the episode of each row; ``None`` where verl trains on others, with a KL penalty in them.
        leave_one_out: ``N / (N - 1)`` for the episodes of a group of N, else 1; 0 where all rewards of a group are
            equal, as in a group of one.
    """
    episodes = [key.rpartition("_")[0] for key in keys]
    groups = [episode.rpartition("_")[0] for episode in episodes]
    values: dict[str, set[Any]] = defaultdict(set)
    # as verl has them: other digits are lost there
    for group, value in zip(groups, episodes if rewards is None else map(np.float32, rewards), strict=True):
        values[group].add(value)
    sizes = Counter(episode.rpartition("_")[0] for episode in set(episodes))

    def factor(group: str) -> float:
        if len(values[group]) == 1:
            return 0.0
        return sizes[group] / (sizes[group] - 1) if leave_one_out else 1.0

    return [factor(group) for group in groups]


def put_right(batch: Any, factors: Sequence[float], credits: Sequence[float]) -> Any:
    """``batch`` (verl's KVBatchMeta) with the advantage ``a`` of each sampled token in the TransferQueue replaced by
    ``factor * a + credit`` of its row."""
    if all(factor == 1.0 for factor in factors) and not any(credits):
        return batch
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    fields = [*_FIELDS, "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    masks = data["response_mask"].unbind()
    changed = {
        name: torch.nested.as_nested_tensor(
            [
                row * factor + mask * credit
                for row, mask, factor, credit in zip(data[name].unbind(), masks, factors, credits, strict=True)
            ],
            layout=torch.jagged,
        )
        for name in _FIELDS
    }
    return tq.kv_batch_put(
        keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(changed, batch_size=len(batch))
    )
