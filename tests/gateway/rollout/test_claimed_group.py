"""Every episode of a group comes to one end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.rollout.claimed_group import Claimed
from gateway.rollout.episode_metadata import Why
from swarm.client import EpisodeEndpoint, EpisodeGroup

PLACES = st.lists(st.integers(0, 4), unique=True)
STEPS = st.lists(st.tuples(st.sampled_from(["some", "all", "over"]), PLACES), max_size=8)


@given(STEPS)
def test_each_episode_is_handed_over_or_given_back_once(steps: list[tuple[str, list[int]]]) -> None:
    ends: Counter[str] = Counter()

    def give_back(episodes: Sequence[EpisodeEndpoint], why: Why) -> None:
        assert episodes
        ends.update(one.episode_uuid for one in episodes)

    episodes = [EpisodeEndpoint(episode_uuid=f"e{k}", base_url="u", api_key="k") for k in range(5)]
    claimed = Claimed(EpisodeGroup(episodes), give_back)
    for step, places in steps:
        before = claimed.open
        if step == "some":
            claimed.give_back(places)
            assert claimed.open == before.difference(places)
        elif step == "all":
            claimed.give_back()
            assert not claimed.open
        elif before.issuperset(places):
            names = claimed.hand_over(places)
            assert names == [f"e{place}" for place in places] and not claimed.open
            ends.update(names)
        else:
            with pytest.raises(ValueError, match="twice"):
                claimed.hand_over(places)
            assert claimed.open == before
    claimed.give_back()
    assert ends == {f"e{k}": 1 for k in range(5)}
