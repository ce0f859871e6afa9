"""A companion keeps the talk going: a finished, short reply that ends with a question and does not repeat itself."""

from __future__ import annotations

from reward_hooks.builtin.rules import Repetition
from reward_hooks.contract import Candidate, HookContext, Reward
from swarm.types import Task

LIMIT = 30  # words
FLUENT = Repetition()


def on_compute_relative_reward(task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
    said = {str(one.get("content", "")).strip() for one in task.init_messages if one.get("role") == "assistant"}
    return [judge(task, candidate, said) for candidate in candidates]


def judge(task: Task, candidate: Candidate, said: set[str]) -> Reward:
    """``said`` are the companion's earlier replies: the same again is worth nothing."""
    text = candidate.text.strip()
    words = len(text.split())
    if not words or candidate.finish_reason == "length" or text in said:
        return Reward(value=0.0, reason="empty, cut off, or said before")
    components = {
        "asks": 1.0 if text.endswith("?") else 0.5 if "?" in text else 0.0,
        "short": min(1.0, LIMIT / words),
        "says": min(1.0, words / 6),
        "fluent": FLUENT.judge(task, candidate).value,
    }
    value = (0.25 + 0.75 * components["asks"]) * components["short"] * components["says"] * components["fluent"]
    return Reward(value=value, components=components, reason=f"{words} words")
