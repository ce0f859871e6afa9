"""Which groups a list shows, and in which order.

Invariant: a search lets others run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Literal, get_args

from gateway.page.kept_groups import KeptGroup
from reward_hooks.contract import texts_of

#: Which groups, and in which order.
View = Literal["newest", "unjudged", "best", "worst", "spread", "disagree", "lost", "equal"]
VIEWS: tuple[str, ...] = get_args(View)
#: Words of a search that count, and seconds of it without a pause.
_MOST_WORDS, _SEARCHING = 10, 0.005


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
    return _in_order(await _with(words.lower().split()[:_MOST_WORDS], fitting), view)


async def _with(words: Sequence[str], groups: list[KeptGroup]) -> list[KeptGroup]:
    if not words:
        return groups
    matching, began = list[KeptGroup](), time.monotonic()
    for group in groups:
        texts = _texts(group)
        if all(word in texts for word in words):
            matching.append(group)
        if time.monotonic() - began >= _SEARCHING:
            await asyncio.sleep(0)
            began = time.monotonic()
    return matching


def _texts(group: KeptGroup) -> str:
    texts = [text for message in group.prompt for text in texts_of(message)]
    for answer in group.answers.values():
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
