"""A frozen lake without slipping, with gymnasium's ``reset`` and ``step``, and the numbers of its FrozenLake-v1.

``gymnasium.make("FrozenLake-v1", desc=lake, is_slippery=False, max_episode_steps=6)`` is the same game.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: an action is the place of its word here
MOVES = ("left", "down", "right", "up")
_STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))


class FrozenLake:
    """One lake: rows of the letters S (start), F (ice), H (hole) and G (goal).

    An observation is the number of the cell: row * columns + column. A move onto the goal earns 1, any other 0; the
    goal and holes end the walk (terminated), and so does its last move (truncated). A move against the edge stays in
    place.
    """

    def __init__(self, lake: Sequence[str], max_episode_steps: int = 6) -> None:
        self.lake = tuple(lake)
        self._last = max_episode_steps
        self._cell = self._moves = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Go to the start; nothing is drawn, so ``seed`` changes nothing."""
        self._cell, self._moves = "".join(self.lake).index("S"), 0
        return self._cell, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Move; returns the observation, the reward, whether the walk is terminated or truncated, and no more."""
        cell = neighbour(self.lake, self._cell, action)
        self._cell = self._cell if cell is None else cell
        self._moves += 1
        here = "".join(self.lake)[self._cell]
        return self._cell, float(here == "G"), here in "GH", self._moves >= self._last, {}


def neighbour(lake: Sequence[str], cell: int, action: int) -> int | None:
    """The cell that ``action`` leads to; ``None`` beyond the edge."""
    columns = len(lake[0])
    row, column = cell // columns + _STEPS[action][0], cell % columns + _STEPS[action][1]
    return row * columns + column if 0 <= row < len(lake) and 0 <= column < columns else None
