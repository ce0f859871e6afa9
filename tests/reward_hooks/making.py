"""Short ways to make what hooks get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reward_hooks import Candidate, HookContext, Task

CONTEXT = HookContext(num_repeat=2)


@dataclass(frozen=True)
class Longer:
    """A hook as an object: longer answers are better, up to ``most`` characters."""

    most: int

    def __call__(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
        return [min(1.0, len(one.text) / self.most) for one in candidates]

    on_compute_relative_reward = __call__


def candidate(text: str = "", index: int = 0, **fields: Any) -> Candidate:
    return Candidate(index=index, message={"role": "assistant", "content": text}, text=text, **fields)


def candidates(*texts: str) -> list[Candidate]:
    return [candidate(text, index) for index, text in enumerate(texts)]


def values(hook: Any, texts: list[str], task: Task | None = None, context: HookContext = CONTEXT) -> list[float]:
    rewards = hook.on_compute_relative_reward(task or Task(task_id="t"), candidates(*texts), context)
    return [round(reward.value, 6) for reward in rewards]


def answered(answer: Any, key: str = "answer") -> Task:
    return Task(task_id="t", metadata={key: answer})
