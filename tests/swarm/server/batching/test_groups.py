"""Groups and batches: a batch stays what it is until its step; losses, age, failures and a full cache drop groups."""

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


def batch_tasks(groups: GroupStore) -> list[tuple[str, int]]:
    """Train on the next batch; its tasks and how many episodes each had."""
    batch = groups.take()
    assert groups.confirm(batch.batch_id) is not None
    return [(group.task_id, len(group.trajectories)) for group in batch.groups]


def test_a_batch_on_which_the_trainer_fails_too_often_is_dropped() -> None:
    groups = store(batch_size=1, batch_attempts=2)
    fill(groups, "a", "a", "b", "b")
    batch = groups.take()
    assert groups.fail("another") is None
    failure = groups.fail(batch.batch_id)
    assert failure is not None
    assert (failure.attempts, failure.dropped) == (1, None)
    assert groups.take() is batch
    groups.give_back()
    assert groups.take() is batch
    failure = groups.fail(batch.batch_id)
    assert failure is not None
    assert failure.attempts == 2
    assert failure.dropped is not None
    assert failure.dropped.cause == "failed"
    assert failure.dropped.episode_uuids == tuple(t.episode_uuid for t in batch.groups[0].trajectories)
    assert "failed on its batch 2 times" in failure.dropped.reason
    assert batch_tasks(groups) == [("b", 2)]


def test_a_lost_episode_drops_its_group_once_all_have_ended() -> None:
    groups = store(batch_size=1, num_repeat=3)
    fill(groups, "a", "a")
    (dropped,) = groups.lose("a")
    assert (len(dropped.episode_uuids), dropped.cause) == (2, "lost")
    assert "1 of 3 episodes of task 'a' cannot be trained" in dropped.reason
    assert dropped.client_uuids == ("me", "me")
    assert groups.episodes == 0
    assert groups.lose("a") == []
    assert fill(groups, "a") == []
    assert len(fill(groups, "a")[0].episode_uuids) == 2
    assert [groups.lose("a") for _ in range(3)] == [[], [], []]
    fill(groups, "a", "a", "a")
    assert groups.ready()


def test_losses_without_a_finished_episode_are_bounded() -> None:
    groups = store(batch_size=1, max_cached_episodes=1)
    for n in range(groups.bound + 1):
        groups.lose(f"t{n}")
    fill(groups, "t0", "t0", f"t{groups.bound}")
    assert groups.tasks() == {"t0": 2}, "the oldest loss was forgotten, the latest was not"


@pytest.mark.parametrize("reward", [0.0, 1.0, -0.25])
def test_a_group_with_equal_rewards_is_uninformative(reward: float) -> None:
    groups = store(batch_size=1, collection="finish_enough_non_dummy_tasks")
    assert groups.add("me", trajectory("a", reward=reward)) == []
    (dropped,) = groups.add("you", trajectory("a", reward=reward))
    assert (len(dropped.episode_uuids), dropped.client_uuids) == (2, ("me", "you"))
    assert dropped.cause == "uninformative"
    assert f"all 2 episodes of task 'a' have the reward {reward:g}" in dropped.reason
    groups.add("me", trajectory("a", reward=reward))
    assert groups.add("me", trajectory("a", reward=reward + 0.5)) == []
    assert batch_tasks(groups) == [("a", 2)]


def test_a_group_with_equal_rewards_and_a_credit_teaches_something() -> None:
    groups = store(batch_size=1, collection="finish_enough_non_dummy_tasks")
    groups.add("me", trajectory("a", reward=1.0))
    assert groups.add("me", structs.replace(trajectory("a", reward=1.0), credit=-0.5)) == []
    assert batch_tasks(groups) == [("a", 2)]


def test_old_episodes_are_dropped_with_a_whole_group_but_singly_from_an_open_one() -> None:
    groups = store(batch_size=3, num_repeat=2, max_staleness=1)
    groups.advance(1)
    for task, version in [("a", 1), ("a", 2), ("b", 2), ("b", 2), ("c", 1), ("d", 2)]:
        groups.add("me", trajectory(task, f"{task}{version}", version=version))
    assert groups.advance(2) == []
    (dropped,) = groups.advance(3)
    assert dropped.episode_uuids == ("a1", "a2", "c1")
    assert dropped.cause == "stale"
    assert "more than 1 weight syncs before version 3" in dropped.reason
    assert groups.tasks() == {"b": 2, "d": 1}
    (dropped,) = groups.add("me", trajectory("d", "late", version=1))
    assert (dropped.episode_uuids, dropped.cause) == (("late",), "stale")


def test_a_full_cache_without_a_batch_in_sight_loses_its_oldest_open_groups() -> None:
    groups = store(batch_size=1, max_cached_episodes=1)
    groups.add("me", trajectory("a", "a1"))
    groups.add("me", trajectory("b", "b1"))
    fill(groups, "c", "d")
    reason, (dropped,) = groups.make_room(0, 2, ready=False)
    assert reason == ""
    assert (dropped.episode_uuids, dropped.cause) == (("a1", "b1"), "evicted")
    assert "more than 4 episodes" in dropped.reason
    assert groups.tasks() == {"c": 1, "d": 1}


def test_a_restored_batch_comes_first_unless_it_failed_too_often() -> None:
    origin = store(batch_size=1)
    fill(origin, "a", "a")
    batch = origin.take()
    groups = store(batch_size=1, batch_attempts=2)
    assert groups.restore(batch, attempts=1) == []
    fill(groups, "b", "b")
    assert groups.take() is batch
    failure = groups.fail(batch.batch_id)
    assert failure is not None
    assert failure.dropped is not None
    again = store(batch_size=1, batch_attempts=2)
    (dropped,) = again.restore(batch, attempts=2)
    assert len(dropped.episode_uuids) == 2
    assert not again.ready()
