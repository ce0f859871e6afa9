"""What a request's headers say of its policy, and who trains."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.config.route import RouteSettings
from gateway.rollout.return_policy import ReturnPolicy
from swarm.errors import RequestError


def settings(**given: Any) -> RouteSettings:
    return RouteSettings(hooks="x", **given)


def of(header: str | None = None, train: str | None = None, **given: Any) -> ReturnPolicy:
    headers = {"x-swarm-policy": header, "x-swarm-train": train}
    return ReturnPolicy.of(settings(**given), {name: value for name, value in headers.items() if value is not None})


def test_without_headers_the_route_decides() -> None:
    assert of() == ReturnPolicy("best", None, None, None)
    assert of(policy="first") == ReturnPolicy("first")
    assert of(quorum=3, answer_deadline_seconds=1.5) == ReturnPolicy("best", 3, 1.5)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("best", ReturnPolicy("best", asked_for=True)),
        ("first", ReturnPolicy("first", asked_for=True)),
        ("best;quorum=4", ReturnPolicy("best", 4, asked_for=True)),
        ("best; deadline=2.5", ReturnPolicy("best", None, 2.5, asked_for=True)),
        ("best;deadline=2;quorum=1", ReturnPolicy("best", 1, 2.0, asked_for=True)),
    ],
)
def test_a_header_replaces_all_of_it(header: str, expected: ReturnPolicy) -> None:
    assert of(header, quorum=2, answer_deadline_seconds=9) == expected


NONSENSE = """
best;quorum=0 best;quorum=x best;quorum=² best;quorum=1;quorum=2 best;deadline=0 best;deadline=nan best;deadline=inf
best;deadline= best; best;odd=1 first;quorum=1 worst
"""


@pytest.mark.parametrize("header", ["", f"best;quorum={'1' * 5000}", f"best;quorum={'0' * 5000}1", *NONSENSE.split()])
def test_a_header_that_means_nothing_is_refused_by_name(header: str) -> None:
    with pytest.raises(RequestError) as failed:
        of(header)
    assert failed.value.param == "x-swarm-policy" and "x-swarm-policy" in failed.value.message


def test_only_who_gets_the_best_of_several_fans_out_where_nothing_trains() -> None:
    assert of().fans_out and not of("first").fans_out and not of(when_batch_waits="single").fans_out
    single = {"x-swarm-when-batch-waits": "single"}
    assert not ReturnPolicy.of(settings(), single).fans_out
    assert ReturnPolicy.of(settings(when_batch_waits="single"), {"x-swarm-when-batch-waits": "best"}).fans_out
    for value in ("", "Best", "first"):
        with pytest.raises(RequestError) as failed:
            ReturnPolicy.of(settings(), {"x-swarm-when-batch-waits": value})
        assert failed.value.param == "x-swarm-when-batch-waits"


@pytest.mark.parametrize("given", [{"untrained_repeat": 1}, {"when_batch_waits": "first"}])
def test_a_group_that_is_not_trained_has_two_answers_or_more(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        settings(**given)


def test_training_can_be_declined_or_insisted_on() -> None:
    never, always = settings(train_fraction=0.0), settings()
    assert of(train="False").trains(always, "r", "1") is False
    assert of(train="true").trains(never, "r", "1") is True
    # one answer has nothing to be compared with
    assert of(train="true").trains(settings(num_repeat=1), "r", "1") is False
    with pytest.raises(RequestError, match="x-swarm-train"):
        of(train="maybe")


def test_the_share_of_requests_that_train_is_drawn_by_their_ids() -> None:
    some = settings(train_fraction=0.25)
    policy = of()
    drawn = [policy.trains(some, "route", f"req-{number}") for number in range(4000)]
    assert 850 < sum(drawn) < 1150
    assert drawn == [policy.trains(some, "route", f"req-{number}") for number in range(4000)]
    assert drawn != [policy.trains(some, "another", f"req-{number}") for number in range(4000)]
    assert not any(policy.trains(settings(train_fraction=0.0), "route", f"req-{number}") for number in range(100))
    assert all(policy.trains(settings(), "route", f"req-{number}") for number in range(100))
