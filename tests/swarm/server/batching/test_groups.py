"""What only single cases show of groups: why they are dropped, in words, and bounds. The rest is the state machine's
(``test_machine.py``)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from swarm.server.batching.groups import Dropped, GroupStore
from swarm.server.batching.shares import Shares
from tests.swarm.server.batching.conftest import Clock, job, trajectory


def store(**more: Any) -> GroupStore:
    one = job(**more)
    return GroupStore(one, Shares(one.num_repeat, 300.0, Clock()))


def fill(groups: GroupStore, *tasks: str) -> list[Dropped]:
    return [dropped for task in tasks for dropped in groups.add("me", trajectory(task))]


def failed(groups: GroupStore) -> list[Dropped]:
    fill(groups, "a", "a")
    batch = groups.take().batch_id
    failures = [groups.fail(batch) for _ in range(3)]
    return [failure.dropped for failure in failures if failure is not None and failure.dropped is not None]


def lost(groups: GroupStore) -> list[Dropped]:
    return fill(groups, "a") + groups.lose("a")


def uninformative(groups: GroupStore) -> list[Dropped]:
    return fill(groups, "a", "a")


def stale(groups: GroupStore) -> list[Dropped]:
    return fill(groups, "a") + groups.advance(2)


def evicted(groups: GroupStore) -> list[Dropped]:
    fill(groups, "a", "b", "c", "d")
    return groups.make_room(0, 1, ready=False)[1]


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        (failed, "the trainer failed on its batch 3 times"),
        (lost, "1 of 2 episodes of task 'a' cannot be trained"),
        (uninformative, "all 2 episodes of task 'a' have the reward 1"),
        (stale, "sampled more than 1 weight syncs before version 2"),
        (evicted, "more than 4 episodes were finished or running"),
    ],
)
def test_what_is_dropped_says_why(drop: Any, words: str) -> None:
    collection = "finish_enough_non_dummy_tasks" if drop is uninformative else "finish_enough_tasks"
    (dropped,) = drop(store(batch_size=1, max_cached_episodes=1, collection=collection))
    assert (dropped.cause, dropped.reason) == (drop.__name__, words)
    assert set(dropped.client_uuids) == {"me"} and len(dropped.client_uuids) == len(dropped.episode_uuids)


def test_losses_without_a_finished_episode_are_bounded() -> None:
    groups = store(batch_size=1, max_cached_episodes=1)
    for n in range(groups.bound + 1):
        groups.lose(f"t{n}")
    fill(groups, "t0", "t0", f"t{groups.bound}")
    assert groups.tasks() == {"t0": 2}, "the oldest loss was forgotten, the latest was not"


def test_a_group_with_equal_rewards_and_a_credit_teaches_something() -> None:
    groups = store(batch_size=1, collection="finish_enough_non_dummy_tasks")
    groups.add("me", trajectory("a", reward=1.0))
    assert groups.add("me", structs.replace(trajectory("a", reward=1.0), credit=-0.5)) == []
    assert groups.ready()
