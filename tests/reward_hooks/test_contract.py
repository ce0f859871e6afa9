"""Group scores and the finiteness of rewards."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from reward_hooks import GroupScore, Reward


def score(*values: float) -> GroupScore:
    return GroupScore(rewards=[Reward(value=value) for value in values])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rewards_and_components_are_finite(value: float) -> None:
    with pytest.raises(ValidationError):
        Reward(value=value)
    with pytest.raises(ValidationError):
        Reward(value=0.0, components={"x": value})


def test_the_numbers_of_a_group() -> None:
    assert [score(*values).informative for values in ((0.0, 1.0), (0.3, 0.1 + 0.2), (1.0,))] == [True, False, False]
    assert score(0.0, 1.0, 0.5).mean == pytest.approx(0.5)
    assert score(0.0, 1.0).values == [0.0, 1.0]
