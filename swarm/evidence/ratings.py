"""``SideRating``: what a user said of one side's answer; ``Ratings``: those of one comparison, and whether they prove
that users like the challenger less.

A user sees the answer of one side, so ratings come in no pairs. Conversations are drawn by chance, so the n-th rating
of the one side and the n-th of the other make a difference whose mean is that of the sides.

Invariant: an answer is rated once; a later rating takes the place of the earlier one. The order in which answers were
first rated decides which ratings are compared.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from pydantic import Field

from swarm.evidence.betting import Wealth
from swarm.evidence.pairs import Side, Terms
from swarm.types import TolerantModel

#: Ratings of each side that count, the first ones.
MAX_RATINGS = 100_000


class SideRating(TolerantModel):
    """A user's rating of one answer, from -1 (bad) to 1 (good); ``answer`` is a digest that names the answer, ``terms``
    are those under which its side answered."""

    answer: str = Field(min_length=1, max_length=64)
    terms: Terms
    side: Side
    rating: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]


class Ratings:
    """The ratings of one comparison.

    Args:
        most: by so much the challenger's mean rating may be lower.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._begin_anew()
        self._by_side: dict[Side, dict[str, float]] = {"challenger": {}, "incumbent": {}}

    def add(self, rating: SideRating) -> None:
        """Count ``rating``."""
        ratings = self._by_side[rating.side]
        if ratings.get(rating.answer) == rating.rating:
            return
        if rating.answer in ratings:
            # bets cannot be taken back
            self._begin_anew()
        if rating.answer in ratings or len(ratings) < MAX_RATINGS:
            ratings[rating.answer] = rating.rating

    @property
    def counts(self) -> tuple[int, int]:
        """How many answers of the challenger and of the incumbent are rated."""
        return len(self._by_side["challenger"]), len(self._by_side["incumbent"])

    def lower(self, alpha: float) -> bool:
        """Whether the challenger's mean rating is proven lower than it may be."""
        ours, theirs = self._by_side["challenger"].values(), self._by_side["incumbent"].values()
        if self._compared < min(self.counts):
            for our, their in islice(zip(ours, theirs, strict=False), self._compared, None):
                self._wealth.add((their - our) / 2)
                self._compared += 1
        return self._wealth.refutes(alpha)

    def _begin_anew(self) -> None:
        # half a difference of two ratings is in [-1, 1]
        self._wealth, self._compared = Wealth(self._most / 2), 0
