"""Which groups a list shows, and in which order.

Invariant: a search lets others run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from statistics import fmean

from pydantic import BaseModel, Field

from gateway.page.kept_groups import KeptAnswer, KeptGroup
from reward_hooks.contract import texts_of

#: Words of a search that count.
_MOST_WORDS = 10


def _rated(groups: list[KeptGroup], worth: Callable[[list[float]], float]) -> list[KeptGroup]:
    """The groups with rewards, those that are worth most first."""
    return sorted((group for group in groups if group.rewards), key=lambda group: -worth(group.rewards))


#: Groups, the newest first -> those that a view shows, in its order.
VIEWS: dict[str, Callable[[list[KeptGroup]], list[KeptGroup]]] = {
    "newest": lambda groups: groups,
    # what still trains comes first
    "unjudged": lambda groups: sorted((group for group in groups if not group.picks), key=lambda group: not group.open),
    "best": lambda groups: _rated(groups, fmean),
    "worst": lambda groups: _rated(groups, lambda rewards: -fmean(rewards)),
    "spread": lambda groups: _rated(groups, lambda rewards: max(rewards) - min(rewards)),
    "disagree": lambda groups: [group for group in groups if group.disagrees],
    "lost": lambda groups: sorted(
        (group for group in groups if (group.lead or 0.0) < 0), key=lambda group: group.lead or 0.0
    ),
    "equal": lambda groups: [group for group in groups if len(group.rewards) > 1 and not group.best],
}


class GroupQuery(BaseModel):
    """What a list asks for; what is empty fits each group."""

    view: str = "newest"
    words: str = ""
    route: str = ""
    key: str = ""
    policy: int | None = Field(default=None, ge=0)
    limit: int = Field(default=100, ge=0)


async def select(groups: Sequence[KeptGroup], query: GroupQuery) -> list[KeptGroup]:
    """Those of ``groups``, the newest first, that fit, in the order of the view."""
    fitting = [
        group
        for group in groups
        if query.route in ("", group.route) and query.key in ("", group.key) and query.policy in (None, group.policy)
    ]
    if words := query.words.lower().split()[:_MOST_WORDS]:
        # answers may join a group meanwhile
        copies = [(group, list(group.answers.values())) for group in fitting]
        fitting = await asyncio.to_thread(_matching, words, copies)
    return VIEWS[query.view](fitting)


def _matching(words: Sequence[str], groups: Sequence[tuple[KeptGroup, Sequence[KeptAnswer]]]) -> list[KeptGroup]:
    texts = ((group, _texts(group, answers)) for group, answers in groups)
    return [group for group, text in texts if all(word in text for word in words)]


def _texts(group: KeptGroup, answers: Sequence[KeptAnswer]) -> str:
    texts = [text for message in group.prompt for text in texts_of(message)]
    for answer in answers:
        texts += (answer.text, answer.reason)
    return " ".join((*texts, group.id, group.session, group.why)).lower()
