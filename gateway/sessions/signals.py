"""Implicit feedback: what a request shows about earlier answers of its conversation.

Invariant: a signal has a strength in (0, 1]; what may be chance is not reported.

=========== ======================================================================
signal      is observed of an answer when
=========== ======================================================================
continued   the user's next message follows it (1.0)
regenerated the same request comes again (1.0)
edited      the conversation comes again with another question before it
repeated    a later question is nearly the same as its question
abandoned   the user went back to an earlier turn, or hung up (1.0)
=========== ======================================================================

The strength of ``edited`` and ``repeated`` is :func:`similarity`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from adapters.dialects.dialect import text_of
from gateway.sessions.conversation import INSTRUCTIONS, DeliveredTurn
from gateway.sessions.memory import Position

_WORD = re.compile(r"\w+|[^\w\s]")
#: Of a text, that are compared.
_MOST_WORDS = 200
#: Below the first similarity a question is a different one, not an edit; from the second on it is repeated.
_EDITED, _REPEATED = 0.5, 0.8
#: Words; "yes" and "go on" are common, and repeat nothing.
_SHORTEST_QUESTION = 4
#: How far back a question is searched for.
_TURNS = 8


def observe(position: Position, asked: bytes, messages: list[dict[str, Any]]) -> list[str]:
    """Note on the turns of ``position`` what a request with ``messages`` (digest ``asked``) shows about them.

    Returns:
        The names of the signals, for counting.
    """
    seen: list[str] = []

    def note(turn: DeliveredTurn, signal: str, strength: float) -> None:
        turn.observe(signal, strength)
        seen.append(signal)

    question = _question_in(messages)
    apart = position.linked_by in ("name", "branch", "compacted")
    before = [] if apart else position.conversation.after(position.parent, position.agent)
    again = next((turn for turn in reversed(before) if turn.asked == asked), None)
    if again is not None and position.conversation.scope.kind == "agent" and "abandoned" in again.observed:
        # an agent whose connection broke asks once more; its user has said nothing
        again.retried = True
        return seen
    if again is not None:
        note(again, "regenerated", 1.0)
    elif before and question and (strength := similarity(_question(before[-1]), question)):
        again = before[-1]
        note(again, "edited", strength)
    if again is not None:
        for turn in _ends_after(position, again):
            note(turn, "abandoned", 1.0)
        for turn in position.conversation.turns:
            turn.left = turn.left or again in turn.path()
    same = position.parent is not None and position.parent.agent == position.agent
    if position.parent is not None and same and again is None and question:
        if position.linked_by == "answer":
            note(position.parent, "continued", 1.0)
        for turn in position.parent.path()[-_TURNS:]:
            if strength := _repeats(_question(turn), question):
                note(turn, "repeated", strength)
    return seen


def _ends_after(position: Position, turn: DeliveredTurn) -> list[DeliveredTurn]:
    """The last turns of the branches that continue ``turn``."""
    later = [after for after in position.conversation.turns if after is not turn and turn in after.path()]
    parents = {id(after.parent) for after in position.conversation.turns}
    return [after for after in later if id(after) not in parents]


def _question(turn: DeliveredTurn) -> str:
    if "messages" not in turn.body:
        prompt = turn.body.get("prompt")
        return prompt if isinstance(prompt, str) else ""
    return _question_in(turn.body["messages"])


def _question_in(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message that is no instructions, if a user said it."""
    last = next((message for message in reversed(messages) if message.get("role") not in INSTRUCTIONS), {})
    return text_of(last) if last.get("role") == "user" else ""


def _repeats(earlier: str, question: str) -> float:
    # of a longer one the end is not compared, and an application may write documents before each question
    fits = _SHORTEST_QUESTION <= len(_words_of(question)) < _MOST_WORDS
    return similarity(earlier, question, _REPEATED) if fits else 0.0


def similarity(text: str, other: str, least: float = _EDITED) -> float:
    """How similar the words of two texts are: the ratio 2 M / T of :mod:`difflib` (Ratcliff and Metzener 1988) over at
    most 200 words of each, or 0 where it is below ``least``."""
    words, others = _words_of(text), _words_of(other)
    matcher = SequenceMatcher(None, words, others, autojunk=False)
    # an upper bound first: most texts have nothing in common, and the ratio costs the product of their lengths
    ratio = matcher.ratio() if words and others and matcher.quick_ratio() >= least else 0.0
    return ratio if ratio >= least else 0.0


def _words_of(text: str) -> list[str]:
    """The first words of a text, in lower case."""
    return _WORD.findall(text[: _MOST_WORDS * 40].lower())[:_MOST_WORDS]
