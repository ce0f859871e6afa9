"""The episodes of one claimed group, from the claim to the end of each.

Invariant: every episode is handed to the submitter or given back exactly once, whatever happens in whatever order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gateway.rollout.episode_metadata import NO_REASON, Why
from swarm.client import EpisodeEndpoint, EpisodeGroup


class Claimed:
    """One group.

    Args:
        episodes: as they were claimed; known by their place from here on.
        give_back: aborts episodes, in the background.
    """

    def __init__(self, episodes: EpisodeGroup, give_back: Callable[[Sequence[EpisodeEndpoint], Why], None]) -> None:
        self.episodes = episodes
        self._give_back = give_back
        self._open = set(range(len(episodes)))

    @property
    def open(self) -> frozenset[int]:
        """The places of the episodes that are neither handed over nor given back."""
        return frozenset(self._open)

    def give_back(self, places: Iterable[int] | None = None, why: Why = NO_REASON) -> None:
        """Abort the episodes at ``places``, of these the ones that are open; default: all. ``why`` is kept."""
        going = sorted(self._open if places is None else self._open.intersection(places))
        if going:
            self._open.difference_update(going)
            self._give_back([self.episodes[place] for place in going], why)

    def hand_over(self, places: Sequence[int], why: Why = NO_REASON) -> list[str]:
        """The names of the episodes at ``places``, whose end is somebody else's from now on; the others go back.

        Args:
            why: kept with those that go back.

        Raises:
            ValueError: one of them is not open.
        """
        if not self._open.issuperset(places):
            raise ValueError("an episode cannot be ended twice")
        self.give_back(self._open.difference(places), why)
        self._open.clear()
        return [self.episodes[place].episode_uuid for place in places]
