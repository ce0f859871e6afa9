"""Rule-based rewards, ready as ``reward_hooks.rules.concise:hooks`` or as parts of a hook file of one's own::

    # on_compute_relative_reward.py
    from reward_hooks.rules import Concise, Repetition, Weighted

    on_compute_relative_reward = Weighted((Concise(full_marks_words=30, zero_words=90), 3.0), (Repetition(), 1.0))

Every rule judges one answer alone and returns a reward in [0, 1] with its components.
"""

from reward_hooks.rules.base import Rule, Weighted
from reward_hooks.rules.concise import Concise
from reward_hooks.rules.format import Json, Matches
from reward_hooks.rules.repetition import Repetition

__all__ = ["Concise", "Json", "Matches", "Repetition", "Rule", "Weighted"]
