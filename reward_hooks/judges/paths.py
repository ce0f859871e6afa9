"""Path expressions into JSON: ``data[*].score``, ``result.scores[0]``, ``data[0].data[-1]``.

Invariant: an expression is checked when it is read, and finds numbers or says at which step it found none.
"""

from __future__ import annotations

import math
import re
from typing import Any, cast

from swarm.errors import ConfigError

_STEP = re.compile(r"\.?([A-Za-z_][\w-]*)|\[(-?\d+|\*)\]")
_Step = str | int | None  # a member, an index, or all elements


class JsonPath:
    """Members by ``.name``, elements by ``[index]`` (negative from the end), all elements by ``[*]``.

    Raises:
        ConfigError: ``text`` is no such expression.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._steps: list[_Step] = []
        position = 0
        while match := _STEP.match(text, position):
            name, index = match.groups()
            self._steps.append(name if name is not None else None if index == "*" else int(index))
            position = match.end()
        if position < len(text) or not self._steps:
            raise ConfigError(
                f"{text!r} is no path expression (wrong at {text[position:] or 'its end'!r}); write it like "
                "data[*].score or result.scores[0]"
            )

    @property
    def many(self) -> bool:
        """Whether it can find more than one number."""
        return None in self._steps

    def numbers(self, value: object) -> list[float]:
        """The numbers found, in the order of the JSON.

        Raises:
            ValueError: a step leads nowhere, or to something that is no finite number.
        """
        found: list[Any] = [value]
        for number, step in enumerate(self._steps):
            found = [inner for outer in found for inner in self._step(outer, step, number)]
        for one in found:
            if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
                raise ValueError(f"{self.text} leads to {str(one)[:60]!r}, which is no finite number")
        return [float(one) for one in found]

    def _step(self, value: object, step: _Step, number: int) -> list[Any]:
        if isinstance(step, str):
            if isinstance(value, dict) and step in value:
                return [cast("dict[str, Any]", value)[step]]
        elif isinstance(value, list):
            listed = cast("list[Any]", value)
            if step is None:
                return listed
            if -len(listed) <= step < len(listed):
                return [listed[step]]
        raise ValueError(f"{self.text} leads nowhere at its step {number + 1}, in {str(value)[:120]!r}")
