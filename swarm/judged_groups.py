"""The groups that were trained on, dropped or wait, for people: what ``GET /judged_groups`` answers, and its search.

Invariant: nothing here is kept for it: rewards and reasons are what clients handed in, tokens what was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from swarm.types import Model

#: Bins of a histogram of rewards.
BINS = 10
#: Groups that are read at once.
MAX_GROUPS = 200


class SampledText(Model):
    """One timeline: token ids of the prompt, and of what follows it, where ``mask`` is 1 on sampled ones."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]


class GroupAnswer(Model):
    """One episode of a group.

    ``state`` is ``waiting``, ``out`` (in the batch that the trainer has), ``trained``, ``dropped`` or ``over`` (given
    up); ``why`` says why it is not trained. ``rank`` is 1 for the best. Times are Unix seconds.
    """

    episode_uuid: str
    state: str
    why: str = ""
    reward: float | None = None
    rank: int | None = None
    is_success: bool | None = None
    components: dict[str, float] = {}
    reason: str = ""
    delivered: bool | None = Field(default=None, description="whether the user got it; null: the client does not say")
    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    policy_version: int | None = None
    finish_reason: str = ""
    ended_at: float = 0.0
    timelines: list[SampledText] = Field(default=[], description="only where tokens are asked for")


class JudgedGroup(Model):
    """The answers to one task, by their claims; of a gateway's also ``route``, ``session`` and ``request_id``."""

    group_id: str
    task_id: str
    query: str = ""
    client: str
    route: str = ""
    session: str = ""
    request_id: str = ""
    hook: str = ""
    code: str = ""
    step: int | None = None
    ended_at: float = 0.0
    answers: list[GroupAnswer]

    @property
    def rewards(self) -> list[float]:
        """Of the answers that have one, the highest first."""
        return sorted((answer.reward for answer in self.answers if answer.reward is not None), reverse=True)

    @property
    def fate(self) -> str:
        """What became of it: the states of its answers, each once, with the first reason."""
        states = dict.fromkeys(answer.state for answer in self.answers)
        why = next((answer.why for answer in self.answers if answer.why), "")
        return ", ".join(states) + (f": {why}" if why else "")


class StepRewards(Model):
    """How many of a training step's rewards lie in each of :data:`BINS` equal parts of ``low`` to ``high``."""

    step: int
    low: float
    high: float
    counts: list[int]


class JudgedGroups(Model):
    """``GET /judged_groups``: the latest groups, newest end first, and the rewards of the latest steps."""

    model: str = ""
    groups: list[JudgedGroup]
    rewards: list[StepRewards] = []


class Wanted(Model):
    """Which groups, and how many of them: all of what is given must hold."""

    group: str = Field(default="", max_length=128, description="only the one whose id begins so")
    words: str = Field(default="", max_length=500, description="in any of its texts")
    route: str = Field(default="", max_length=500, description="name of its route or client")
    reason: str = Field(default="", max_length=500, description="part of a reason, or of why it was dropped")
    at_least: float | None = Field(default=None, description="some answer's reward")
    at_most: float | None = Field(default=None, description="some answer's reward")
    limit: int = Field(default=20, ge=1, le=MAX_GROUPS)
    tokens: bool = Field(default=False, description="with the token ids")

    def fits(self, group: JudgedGroup, texts: Sequence[str] = ()) -> bool:
        """Whether ``group`` is among them; ``texts`` are its prompts and answers, where they can be read."""
        reasons = [answer.reason for answer in group.answers] + [answer.why for answer in group.answers]
        if self.reason and not any(self.reason.lower() in reason.lower() for reason in reasons):
            return False
        if self.route and self.route not in (group.route, group.client):
            return False
        low = -float("inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        bounded = self.at_least is not None or self.at_most is not None
        if bounded and not any(low <= reward <= high for reward in group.rewards):
            return False
        names = [group.group_id, group.task_id, group.query, group.session, group.hook]
        everything = " ".join([*names, *reasons, *texts]).lower()
        return all(word in everything for word in self.words.lower().split())


def histogram(step: int, rewards: Sequence[float], low: float, high: float) -> StepRewards:
    """``rewards`` by equal parts of ``low`` to ``high``, both included."""
    counts = [0] * BINS
    span = high - low
    for reward in rewards:
        counts[min(BINS - 1, int(BINS * (reward - low) / span)) if span > 0 else 0] += 1
    return StepRewards(step=step, low=low, high=high, counts=counts)


def sampled(line: SampledText) -> list[int]:
    """The token ids that the policy sampled."""
    return [token for token, mask in zip(line.response_ids, line.mask, strict=True) if mask]


def as_json(groups: Sequence[JudgedGroup]) -> list[dict[str, Any]]:
    """For scripts: as models are, with what became of each group."""
    return [{**group.model_dump(mode="json"), "fate": group.fate} for group in groups]
