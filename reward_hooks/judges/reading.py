"""Read verdicts: the JSON in a judge's reply, and the mean of its distribution where log-probabilities are given.

Invariant: what is not there is ``Unparsable``; a number is the judge's own or the mean over its own alternatives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import exp
from typing import Any, cast

from reward_hooks.judges.client import Unparsable

#: The scale of scores: one digit, so that it is one token everywhere and its alternatives are the whole distribution.
LOWEST, HIGHEST = 0, 9
#: The scores on the scale, as the judge writes them, each with its value.
DIGITS: Mapping[str, float] = {str(score): float(score) for score in range(LOWEST, HIGHEST + 1)}
#: Alternatives that carry less than this of the probability say nothing of the rest.
_ENOUGH = 0.5


def text_of(choice: Mapping[str, Any]) -> str:
    """The text of a choice that ended by itself.

    Raises:
        Unparsable: cut off, or no text.
    """
    if choice.get("finish_reason") == "length":
        raise Unparsable("it was cut off at max_tokens")
    content: Any = cast("dict[str, Any]", choice.get("message") or {}).get("content")
    if not isinstance(content, str) or not content.strip():
        raise Unparsable("it is empty")
    return content


def json_of(text: str) -> dict[str, Any]:
    """The JSON object in ``text``, with or without words and fences around it.

    Raises:
        Unparsable: there is none.
    """
    start, end = text.find("{"), text.rfind("}")
    try:
        value: Any = json.loads(text[start : end + 1]) if 0 <= start < end else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Unparsable(f"it has no JSON object: {text[:120]!r}")
    return cast("dict[str, Any]", value)


def score_of(value: object) -> int:
    """A score on the scale.

    Raises:
        Unparsable: it is no whole number, or off the scale.
    """
    if isinstance(value, str) and value.strip() in DIGITS:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or int(value) != value:
        raise Unparsable(f"{value!r} is no whole score")
    if not LOWEST <= value <= HIGHEST:
        raise Unparsable(f"the score {value:g} is not within {LOWEST} and {HIGHEST}")
    return int(value)


def means(choice: Mapping[str, Any], key: str, values: Mapping[str, float], count: int) -> list[float] | None:
    """For each ``"key": ...`` in a JSON reply, the mean of ``values`` over what the judge might have said there.

    The mean weighs each value with the probability of its token (G-Eval: Liu et al. 2023, "G-Eval: NLG Evaluation using
    GPT-4 with Better Human Alignment", arXiv:2303.16634), which is finer than the one token that was sampled.

    Returns:
        ``count`` means in the order of the reply; ``None`` where no log-probabilities are offered or one of the
        places does not show enough of its distribution: plain verdicts and means are not mixed in one group.
    """
    tokens = _tokens(choice)
    text = "".join(str(token.get("token", "")) for token in tokens)
    places = [match.start(1) for match in re.finditer(rf'(?<!\\)"{re.escape(key)}"\s*:\s*"?([^\s"])', text)]
    if len(places) != count:
        return None
    found: list[float] = []
    position = 0
    waiting = iter(places)
    place = next(waiting, None)
    for token in tokens:
        position += len(str(token.get("token", "")))
        while place is not None and place < position:
            mean = _mean(token.get("top_logprobs"), values)
            if mean is None:
                return None
            found.append(mean)
            place = next(waiting, None)
    return found


def _tokens(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed: Any = cast("dict[str, Any]", choice.get("logprobs") or {}).get("content")
    return [one for one in cast("list[Any]", listed) if isinstance(one, dict)] if isinstance(listed, list) else []


def _mean(alternatives: object, values: Mapping[str, float]) -> float | None:
    weights: dict[str, float] = {}
    for one in cast("list[dict[str, Any]]", alternatives) if isinstance(alternatives, list) else []:
        said, logprob = str(one.get("token", "")).strip(' "\n'), one.get("logprob")
        if said in values and isinstance(logprob, int | float):
            weights[said] = weights.get(said, 0.0) + exp(min(0.0, logprob))
    total = sum(weights.values())
    return sum(values[said] * weight for said, weight in weights.items()) / total if total >= _ENOUGH else None
