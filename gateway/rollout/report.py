"""What the user may know of a group: ``x-swarm-`` headers, and the ``swarm`` object of a stream.

Invariant: what is not known is not there, or null; nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.stats import DropReason


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What came of one group, as far as is known when its answer leaves.

    Attributes:
        policy_version: of the weights that sampled the first answer.
        reward: of the first answer, as the hook gave it; ``None`` where there is no score.
        reward_mean: over the answers that were judged with it.
        trained: acknowledged by the swarm server; ``None`` while that is not known.
        drop_reason: why the group is not trained.
    """

    policy_version: int | None = None
    reward: float | None = None
    reward_mean: float | None = None
    trained: bool | None = None
    drop_reason: DropReason | None = None

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "policy_version": self.policy_version,
            "reward": self.reward,
            "reward_mean": self.reward_mean,
            "trained": self.trained,
            "drop_reason": self.drop_reason,
        }

    def headers(self) -> dict[str, str]:
        """As response headers."""
        trained = {True: "true", False: "false", None: "pending"}[self.trained]
        values = {
            "x-swarm-policy-version": self.policy_version,
            "x-swarm-reward": self.reward,
            "x-swarm-reward-mean": self.reward_mean,
            "x-swarm-trained": trained,
            "x-swarm-drop-reason": self.drop_reason,
        }
        return {name: str(value) for name, value in values.items() if value is not None}
