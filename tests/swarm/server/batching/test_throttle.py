"""A claim beyond its client's share waits; a task begun never does, nor does anybody for clients that do nothing."""

from __future__ import annotations

import pytest

from swarm.protocol import SwarmThrottlePolicy
from swarm.server.batching.clients import Clients
from swarm.server.batching.shares import Shares, Throttle
from tests.swarm.server.batching.conftest import Clock, job


class Scene:
    """Client ``a`` asks; ``b`` trains too."""

    def __init__(self, clock: Clock, **more: int) -> None:
        one = job(**({"batch_size": 10, "num_repeat": 2} | more))
        self.shares = Shares(one.num_repeat, 100.0, clock)
        self.clients = Clients(100.0, clock, clock)
        self.throttle = Throttle(one, self.shares, self.clients, 100.0, clock)
        self.clients.seen("a", train=True)
        self.clients.seen("b", train=True)
        self.shares.claimed("b", "theirs", 1)

    def refusal(self, task: str | None, count: int = 1, **policy: float) -> str:
        ratio = {"ratio": 0.4} | policy
        return self.throttle.refusal("a", count, SwarmThrottlePolicy(current_task_id=task, **ratio))  # type: ignore[arg-type]

    def begin(self, *tasks: str) -> None:
        for task in tasks:
            self.shares.claimed("a", task, 1)


@pytest.fixture
def scene(clock: Clock) -> Scene:
    return Scene(clock)


def test_a_new_task_beyond_the_share_waits(scene: Scene) -> None:
    scene.begin("t1", "t2", "t3", "t3")
    assert scene.refusal("t4") == scene.refusal("t3") == "", "a new task, or another group of a complete one"
    scene.begin("t4")
    assert scene.refusal("t5") == "throttled: 4 tasks of this client are in the batch, its share is 4 of 10"
    assert scene.refusal("t4") == "", "a task begun is never delayed"
    scene.begin("t4")
    assert scene.refusal("t4") != "", "it is complete: this would be another group"
    assert scene.refusal("t4", expected_num_repeat=3) == ""


def test_a_share_is_not_rounded_up_for_a_rounding_error(clock: Clock) -> None:
    scene = Scene(clock, batch_size=100)
    scene.begin(*(f"t{n}" for n in range(7)))
    assert 100 * 0.07 > 7
    assert "its share is 7 of 100" in scene.refusal("more", ratio=0.07)


def test_waiting_episodes_count_and_whole_groups_do(scene: Scene) -> None:
    scene.shares.completed(["a", "a"])
    scene.shares.completed(["a", "b"])
    scene.shares.joined("a", "t1")
    scene.begin("t2")
    assert scene.refusal("t3")
    assert scene.refusal("t1") == ""
    scene.shares.left(["a", "a"])
    assert scene.refusal("t3") == ""


def test_claims_without_a_hint_count_by_the_group(scene: Scene) -> None:
    scene.shares.claimed("a", "", 7)
    assert scene.refusal(None) == ""
    scene.shares.claimed("a", "", 1)
    assert scene.refusal(None)


def test_lifted_while_no_other_client_trains(scene: Scene, clock: Clock) -> None:
    scene.begin("t1", "t2", "t3", "t4")
    clock.now += 50
    scene.clients.seen("a", train=True)
    assert scene.refusal("t5")
    assert scene.throttle.next_lift() == clock.now + 50
    clock.now += 50
    assert scene.refusal("t5") == ""


def test_a_tiny_ratio_still_gets_one_task(scene: Scene) -> None:
    assert scene.refusal("t1", ratio=1e-12) == ""
    scene.begin("t1")
    assert scene.refusal("t2", ratio=1e-12)


def test_when_nothing_has_run_for_long_everyone_may_go_on(scene: Scene, clock: Clock) -> None:
    for _ in range(4):
        scene.shares.completed(["a", "a"])
    scene.shares.released("b", "theirs")
    assert scene.refusal("t5")
    for _ in range(2):
        clock.now += 49
        scene.clients.seen("b", train=True)
        assert scene.refusal("t5")
    assert scene.throttle.next_lift() == clock.now + 2
    clock.now += 2
    assert scene.refusal("t5") == ""
    assert scene.throttle.next_lift() == clock.now + 98
