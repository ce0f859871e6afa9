"""The hook contract: every type that a reward hook receives or returns, and the two functions a hook file defines.

Invariant: a reward is a finite number with its reasons; there is no default reward and no random score.

A hook folder holds two files, each with one function of the file's own name, sync or async::

    # on_compute_relative_reward.py (required)
    def on_compute_relative_reward(task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
        return [1.0 / (1 + len(candidate.text)) for candidate in candidates]  # or a Reward for each

    # on_user_submit_new_requests.py (optional; without it: N identical requests, task_id = request_id)
    def on_user_submit_new_requests(request: UserRequest, context: HookContext) -> list[dict] | Submission:
        return [dict(request.body) for _ in range(context.num_repeat)]

Further files of the folder can be imported by name, as in ``from helper import grade`` (an installed module of the same
name goes first).

The first is asked once per user request, with all N answers, and returns one reward per candidate in their order: only
the differences inside the group train the model. The second is asked before sampling and returns N request bodies
(``context.num_repeat`` of them), or a ``Submission`` that also says which task they belong to.

Both are pure functions of their arguments: what they get is a copy, and a hook that raises, hangs, or returns
something else drops the group from training while the user still gets an answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import Field, FiniteFloat

from swarm.types import Model, Task

#: Names of the two hook functions, of the files that hold them, and of their positional parameters.
SUBMIT = "on_user_submit_new_requests"
REWARD = "on_compute_relative_reward"
PARAMETERS: dict[str, tuple[str, ...]] = {SUBMIT: ("request", "context"), REWARD: ("task", "candidates", "context")}

#: Rewards closer than this are equal: no GRPO advantage can come of them.
EQUAL_WITHIN = 1e-9


class UserRequest(Model):
    """One request of the app as it arrived.

    ``body`` is the JSON body of the call, unknown fields included; ``headers`` have lower-case names, and those whose
    name tells of a secret (``authorization``, ``x-api-key``, ``cookie``, ``x-auth-token``, ...) are left out.
    """

    request_id: str = Field(min_length=1)
    body: dict[str, Any]
    model: str = ""
    headers: dict[str, str] = {}


class HookContext(Model):
    """What a hook may know of its surroundings.

    ``policy_version`` is the trainer step whose weights serve now (``None`` when unknown); ``group_id`` names the group
    in logs; the hook is given up after ``deadline_seconds`` from its start.
    """

    num_repeat: int = Field(ge=1)
    policy_version: int | None = None
    group_id: str = ""
    deadline_seconds: float = Field(default=30.0, gt=0)


class Submission(Model):
    """The N request bodies to sample and the task they belong to."""

    task: Task
    requests: list[dict[str, Any]] = Field(min_length=1)


class Candidate(Model):
    """One sampled answer.

    ``message`` is the OpenAI message of the choice; ``text`` its text content ("" when there is none). Token counts are
    the engine's own; ``latency_seconds`` runs from sending the request to its last byte.
    """

    index: int = Field(ge=0)
    message: dict[str, Any]
    text: str = ""
    tool_calls: list[dict[str, Any]] = []
    finish_reason: str = "stop"
    completion_tokens: int = Field(default=0, ge=0)
    prompt_tokens: int = Field(default=0, ge=0)
    latency_seconds: float = Field(default=0.0, ge=0)
    policy_version: int | None = None


class Reward(Model):
    """The reward of one candidate; ``components`` are logged as metrics, ``reason`` is for people."""

    value: FiniteFloat
    components: dict[str, FiniteFloat] = {}
    reason: str = ""


class GroupScore(Model):
    """The validated rewards of one group, in the order of its candidates."""

    rewards: list[Reward] = Field(min_length=1)

    @property
    def values(self) -> list[float]:
        """The bare numbers."""
        return [reward.value for reward in self.rewards]

    @property
    def mean(self) -> float:
        """Mean reward of the group."""
        return sum(self.values) / len(self.rewards)

    @property
    def informative(self) -> bool:
        """Whether the rewards differ: a group of equal rewards has no advantage and teaches nothing."""
        return max(self.values) - min(self.values) > EQUAL_WITHIN

    @property
    def best(self) -> int:
        """Index of the highest reward, the first among equals."""
        return max(range(len(self.rewards)), key=lambda index: (self.values[index], -index))


SubmitResult = list[dict[str, Any]] | Submission
RewardResult = list[float | Reward] | list[float] | list[Reward]
SubmitHook = Callable[[UserRequest, HookContext], SubmitResult | Awaitable[SubmitResult]]
RewardHook = Callable[[Task, list[Candidate], HookContext], RewardResult | Awaitable[RewardResult]]


@dataclass(frozen=True)
class Hooks:
    """The two functions in use; ``source`` says where they came from, for messages. ``submit`` may be absent."""

    reward: RewardHook
    submit: SubmitHook | None = None
    source: str = "hooks"
