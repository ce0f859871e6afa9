"""Calls, timelines and trajectories of few words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarm.tokens import ModelCall, Timeline, Trajectory


def model_call(
    prompt: Sequence[int], response: Sequence[int], version: int = 0, newest: int | None = None, **fields: Any
) -> ModelCall:
    """Sampled by the weights of ``version``, and of those up to ``newest``."""
    made: dict[str, Any] = {"call_id": "c", "logprobs": [-1.0] * len(response), "finish_reason": "stop"}
    return ModelCall(
        prompt_ids=list(prompt),
        response_ids=list(response),
        min_policy_version=version,
        max_policy_version=version if newest is None else newest,
        **made | fields,
    )


def timeline(
    prompt: Sequence[int], response: Sequence[int], version: int = 0, newest: int | None = None, **fields: Any
) -> Timeline:
    """One call's, unless ``fields`` say otherwise; what its mask leaves out has no log-probability."""
    mask: list[int] = fields.pop("response_mask", [1] * len(response))
    made: dict[str, Any] = {"logprobs": [-1.0 if bit else 0.0 for bit in mask], "num_calls": 1}
    return Timeline(
        prompt_ids=list(prompt),
        response_ids=list(response),
        response_mask=mask,
        min_policy_version=version,
        max_policy_version=version if newest is None else newest,
        **made | fields,
    )


def trajectory(*timelines: Timeline, **fields: Any) -> Trajectory:
    made: dict[str, Any] = {"episode_uuid": "e", "task_id": "t", "reward": 1.0, "num_calls": len(timelines)}
    return Trajectory(timelines=list(timelines), **made | fields)
