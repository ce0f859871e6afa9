"""Group scores and the finiteness of rewards."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from reward_hooks import Candidate, GroupScore, Reward


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


@pytest.mark.parametrize(
    ("arguments", "malformed"),
    [
        ('{"a": 1}', False),
        ("", False),
        (None, False),
        ('{"a": 1', True),
        ("[1]", True),
        ("null", True),
        ("[" * 9999, True),
    ],
)
def test_a_call_that_no_client_can_run_is_told(arguments: str | None, malformed: bool) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    good = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    candidate = Candidate(index=0, message={}, tool_calls=[good, call])
    assert candidate.malformed_calls == ([call] if malformed else [])
