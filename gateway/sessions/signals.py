"""What a request lets be known of earlier answers of its conversation: implicit feedback.

Invariant: a signal says what happened and how surely, in (0, 1]; what cannot be told apart from chance is not said.

========== =========================================== =================================================
signal     of the answer                               is observed when
========== =========================================== =================================================
continued  that the user went on from                  the user's next message comes after it (1.0)
regenerated that was asked for anew                    the same request comes again (1.0)
edited     whose question, or itself, was changed      another question, or answer, stands in its place
repeated   that was asked for again later              a later question is nearly the same
abandoned  that was left behind                        the user went back beyond it (1.0), or hung up
========== =========================================== =================================================

``edited`` and ``repeated`` are as sure as the words are alike: the ratio 2 M / T of :mod:`difflib` (Ratcliff and
Metzener 1988) over at most 200 words of each.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from gateway.sessions.digest import text_of

if TYPE_CHECKING:
    from gateway.sessions.conversation import Place
    from gateway.sessions.turns import DeliveredTurn

_WORD = re.compile(r"\w+|[^\w\s]")
_WORDS = 200
#: Below it a text is another one, not an edit of the first.
_EDITED = 0.5
#: From it on a question is the same question.
_REPEATED = 0.8
#: "yes" and "go on" are said often, and repeat nothing.
_SHORTEST_QUESTION = 4
#: How far back a question is looked for.
_TURNS = 8


def alike(one: str, other: str) -> float:
    """How surely ``other`` is an edit of ``one``: from 0.5 to 1, or 0 where it is a text of its own."""
    ratio = _ratio(_words(one), _words(other))
    return ratio if ratio >= _EDITED else 0.0


def observe(place: Place, asked: bytes, messages: list[dict[str, Any]]) -> list[str]:
    """Note on the turns of ``place`` what a request with ``messages`` (digest ``asked``) says of them.

    Returns:
        The names of the signals, for counting.
    """
    seen: list[str] = []

    def note(turn: DeliveredTurn, signal: str, strength: float) -> None:
        turn.observe(signal, strength)
        seen.append(signal)

    last = messages[-1]
    question = text_of(last) if last.get("role") == "user" else ""
    before = [] if place.known == "name" else place.conversation.after(place.parent)
    again = next((turn for turn in reversed(before) if turn.asked == asked), None)
    if again is not None:
        note(again, "regenerated", 1.0)
    elif before and question and (strength := alike(_question(before[-1]), question)):
        again = before[-1]
        note(again, "edited", strength)
    if again is not None:
        for turn in _ends_after(place, again):
            note(turn, "abandoned", 1.0)
    if place.parent is not None and again is None and question:
        if place.known == "answer":
            note(place.parent, "continued", 1.0)
        for turn in place.parent.path()[-_TURNS:]:
            if strength := _repeats(_question(turn), question):
                note(turn, "repeated", strength)
    if place.parent is not None and place.known == "altered":
        note(place.parent, "edited", place.strength)
    return seen


def _ends_after(place: Place, turn: DeliveredTurn) -> list[DeliveredTurn]:
    """The last turns of what went on from ``turn``, without itself."""
    later = [one for one in place.conversation.turns if one is not turn and turn in one.path()]
    parents = {id(one.parent) for one in place.conversation.turns}
    return [one for one in later if id(one) not in parents]


def _question(turn: DeliveredTurn) -> str:
    if "messages" not in turn.body:
        prompt = turn.body.get("prompt")
        return prompt if isinstance(prompt, str) else ""
    last = turn.body["messages"][-1]
    return text_of(last) if last.get("role") == "user" else ""


def _repeats(earlier: str, question: str) -> float:
    words = _words(question)
    ratio = _ratio(_words(earlier), words) if len(words) >= _SHORTEST_QUESTION else 0.0
    return ratio if ratio >= _REPEATED else 0.0


def _words(text: str) -> list[str]:
    return _WORD.findall(text[: _WORDS * 40].lower())[:_WORDS]


def _ratio(one: list[str], other: list[str]) -> float:
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    # an upper bound first: most texts have nothing in common, and the ratio costs the product of their lengths
    return matcher.ratio() if one and other and matcher.quick_ratio() >= _EDITED else 0.0
