"""Rule-based rewards, by name (``concise``) or in a hook file::

    # on_compute_relative_reward.py
    from reward_hooks.builtin.rules import Concise

    on_compute_relative_reward = Concise(full_marks_words=30, zero_words=90)

Every rule scores one answer alone and returns a reward in [0, 1] with its components. To combine rules, see
:mod:`reward_hooks.compose`.
"""

from reward_hooks.builtin.rules.concise import Concise
from reward_hooks.builtin.rules.format import Json, JsonSchema, Matches
from reward_hooks.builtin.rules.language import Language
from reward_hooks.builtin.rules.text import Length, Repetition, Words
from reward_hooks.builtin.rules.tools import ToolCalls
from reward_hooks.contract import Rule

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
    "Words",
]
