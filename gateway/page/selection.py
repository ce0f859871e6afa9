"""Which groups a list shows, and in which order.

Invariant: a search lets others run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal, get_args

from gateway.page.kept_groups import KeptAnswer, KeptGroup
from reward_hooks.contract import texts_of

#: Which groups, and in which order.
View = Literal["newest", "unjudged", "best", "worst", "spread", "disagree", "lost", "equal"]
VIEWS: tuple[str, ...] = get_args(View)
#: Words of a search that count.
_MOST_WORDS = 10


async def select(
    groups: Sequence[KeptGroup],
    view: str = "newest",
    words: str = "",
    route: str = "",
    key: str = "",
    policy: int | None = None,
) -> list[KeptGroup]:
    """Those of ``groups``, the newest first, that fit, in the order of ``view``."""
    fitting = [
        group
        for group in groups
        if (not route or group.route == route)
        and (not key or group.key == key)
        and (policy is None or group.policy == policy)
    ]
    if wanted := words.lower().split()[:_MOST_WORDS]:
        # answers may join a group meanwhile
        copies = [(group, list(group.answers.values())) for group in fitting]
        fitting = await asyncio.to_thread(_matching, wanted, copies)
    return _in_order(fitting, view)


def _matching(words: Sequence[str], groups: Sequence[tuple[KeptGroup, Sequence[KeptAnswer]]]) -> list[KeptGroup]:
    def matches(texts: str) -> bool:
        return all(word in texts for word in words)

    return [group for group, answers in groups if matches(_texts(group, answers))]


def _texts(group: KeptGroup, answers: Sequence[KeptAnswer]) -> str:
    texts = [text for message in group.prompt for text in texts_of(message)]
    for answer in answers:
        texts += (answer.text, answer.reason)
    return " ".join((*texts, group.id, group.session, group.why)).lower()


def _in_order(groups: list[KeptGroup], view: str) -> list[KeptGroup]:
    def mean(group: KeptGroup) -> float:
        return sum(group.rewards) / len(group.rewards)

    rated = [group for group in groups if group.rewards]
    match view:
        case "unjudged":
            # what still trains comes first
            return sorted((group for group in groups if not group.picks), key=lambda group: not group.open)
        case "best":
            return sorted(rated, key=lambda group: -mean(group))
        case "worst":
            return sorted(rated, key=mean)
        case "spread":
            return sorted(rated, key=lambda group: min(group.rewards) - max(group.rewards))
        case "disagree":
            return [group for group in groups if group.disagrees]
        case "lost":
            lost = [group for group in groups if group.lead is not None and group.lead < 0]
            return sorted(lost, key=lambda group: group.lead or 0.0)
        case "equal":
            return [group for group in rated if len(group.rewards) > 1 and not group.best]
        case _:
            return groups
