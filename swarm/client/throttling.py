"""How the claims of a client are throttled: its share of each batch, and shares that follow the training step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ConfigDict

from swarm.client import wire
from swarm.errors import RequestError
from swarm.protocol import SwarmThrottlePolicy


@dataclass(frozen=True)
class ThrottleSchedule:
    """A throttle policy whose ratio depends on the training step.

    Args:
        ratios: a function from the step to the ratio, or steps with the ratio from each on, e.g.
            ``[(0, 0.8), (100, 0.4)]``; before the first of them, the first ratio holds.
        expected_batch_size: tasks per batch; default the job's.
        expected_num_repeat: episodes per task; default the job's.
        current_task_id: the task that the next episode is for; see :meth:`for_task`.

    Raises:
        RequestError: no ratios, or steps that do not rise.
    """

    ratios: Callable[[int], float] | Sequence[tuple[int, float]]
    expected_batch_size: int | None = None
    expected_num_repeat: int | None = None
    current_task_id: str | None = None

    def __post_init__(self) -> None:
        if callable(self.ratios):
            return
        steps = [step for step, _ in self.ratios]
        if not steps or any(later <= earlier for earlier, later in itertools.pairwise(steps)):
            raise RequestError("a ratio schedule is a list of (step, ratio) with rising steps", param="ratios")

    def for_task(self, task_id: str) -> ThrottleSchedule:
        """The same schedule for an episode of this task: one already begun is never delayed."""
        return replace(self, current_task_id=task_id)

    def at(self, step: int) -> SwarmThrottlePolicy:
        """The policy of a training step.

        Raises:
            RequestError: the ratio is no positive number.
        """
        fields = {
            "ratio": self._ratio(step),
            "expected_batch_size": self.expected_batch_size,
            "expected_num_repeat": self.expected_num_repeat,
            "current_task_id": self.current_task_id,
        }
        return wire.checked(SwarmThrottlePolicy, fields)

    def _ratio(self, step: int) -> float:
        if callable(self.ratios):
            return self.ratios(step)
        return next((ratio for begin, ratio in reversed(self.ratios) if begin <= step), self.ratios[0][1])


#: How a claim may be throttled: one policy, a policy that follows the step, or a policy's fields.
Throttle = SwarmThrottlePolicy | ThrottleSchedule | Mapping[str, Any]


class _OurThrottle(SwarmThrottlePolicy):
    """What a caller here misspells is no field of a foreign client."""

    model_config = ConfigDict(extra="forbid")


def as_policy(throttle: Throttle | None, task_id: str | None = None) -> SwarmThrottlePolicy | ThrottleSchedule | None:
    """``throttle`` with its fields checked, for an episode of the task ``task_id`` if one is named.

    Raises:
        RequestError: a field is out of range, there is no such field, or it is no policy at all.
    """
    if throttle is None:
        return None
    if isinstance(throttle, ThrottleSchedule):
        return throttle if task_id is None else throttle.for_task(task_id)
    policy = wire.checked(_OurThrottle, throttle) if isinstance(throttle, Mapping) else throttle
    if not isinstance(policy, SwarmThrottlePolicy):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(policy).__name__
        kinds = "a SwarmThrottlePolicy, its fields or a ThrottleSchedule"
        raise RequestError(f"throttle_policy is {kinds}, not a {kind}", param="throttle_policy")
    return policy if task_id is None else policy.model_copy(update={"current_task_id": task_id})
