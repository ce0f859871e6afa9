"""Rule-based rewards, ready by name (``concise``), or as parts of a hook file of one's own::

    # on_compute_relative_reward.py
    from reward_hooks.rules import Concise, Repetition, Weighted

    on_compute_relative_reward = Weighted((Concise(full_marks_words=30, zero_words=90), 3.0), (Repetition(), 1.0))

Every rule judges one answer alone and returns a reward in [0, 1] with its components.
"""

from reward_hooks.rules.base import Rule, Weighted
from reward_hooks.rules.concise import Concise
from reward_hooks.rules.format import Json, JsonSchema, Matches
from reward_hooks.rules.language import Language
from reward_hooks.rules.text import Length, Repetition, Words
from reward_hooks.rules.tools import ToolCalls

__all__ = [
    "Concise",
    "Json",
    "JsonSchema",
    "Language",
    "Length",
    "Matches",
    "Repetition",
    "Rule",
    "ToolCalls",
    "Weighted",
    "Words",
]
