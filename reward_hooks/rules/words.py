"""``words``: answers that say what they should and not what they must not.

The reward is the share of the wanted words and phrases that occur, divided by one plus the number of times that a
banned one occurs. (Keyword constraints as in IFEval, arXiv:2311.07911, with partial credit so that a group differs.)

Fails when: words stand for what they do not say. A wanted word in a list of keywords counts like one in a sentence, and
a banned one counts when quoted or denied. Words are told apart by what is no letter or digit, so a script without
spaces between words never matches inside a sentence: set ``whole`` to false there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reward_hooks.contract import Candidate, Reward
from reward_hooks.rules.base import Rule
from swarm.errors import ConfigError
from swarm.types import Task


class Words(Rule):
    """The rule with its words; upper and lower case are the same.

    Args:
        wanted: words or phrases that should all occur.
        banned: words or phrases that should not.
        whole: match whole words only.

    Raises:
        ConfigError: no words at all, an empty one, or a bare string in place of a list.
    """

    def __init__(self, wanted: Sequence[str] = (), banned: Sequence[str] = (), *, whole: bool = True) -> None:
        if isinstance(wanted, str) or isinstance(banned, str):
            raise ConfigError("Words needs lists of words, not a string")
        if not (wanted or banned) or not all(str(word).strip() for word in (*wanted, *banned)):
            raise ConfigError("Words needs wanted or banned words, none of them empty")
        self._wanted = {str(word): _pattern(str(word), whole) for word in wanted}
        self._banned = {str(word): _pattern(str(word), whole) for word in banned}

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        """Judge one answer; an empty one earns 0."""
        if not candidate.text.strip():
            return Reward(value=0.0, reason="empty")
        missing = [word for word, pattern in self._wanted.items() if not pattern.search(candidate.text)]
        said = {word: len(pattern.findall(candidate.text)) for word, pattern in self._banned.items()}
        share = 1 - len(missing) / len(self._wanted) if self._wanted else 1.0
        faults = sum(said.values())
        reasons = [f"lacks {', '.join(missing)}"] if missing else []
        if faults:
            reasons.append(f"says {', '.join(word for word, count in said.items() if count)}")
        return Reward(
            value=share / (1 + faults),
            components={"wanted_share": share, "banned_count": float(faults)},
            reason="; ".join(reasons),
        )


def _pattern(word: str, whole: bool) -> re.Pattern[str]:
    # any white space between the words of a phrase: answers wrap their lines
    text = r"\s+".join(re.escape(part) for part in word.split())
    return re.compile(rf"(?<!\w){text}(?!\w)" if whole else text, re.IGNORECASE)
