"""Groups and batches: first complete first out, a lost episode drops its group, a batch ends with its step."""

from __future__ import annotations

import pytest

from swarm.errors import StateError
from swarm.server.groups import GroupStore
from swarm.types import Timeline, Trajectory


def trajectory(task: str, name: str = "e", reward: float = 1.0) -> Trajectory:
    timeline = Timeline(
        prompt_ids=[1],
        response_ids=[2],
        response_mask=[1],
        logprobs=[-1.0],
        min_policy_version=0,
        max_policy_version=0,
        num_calls=1,
    )
    return Trajectory(episode_uuid=name, task_id=task, reward=reward, timelines=[timeline], num_calls=1)


def fill(store: GroupStore, *tasks: str) -> None:
    for task in tasks:
        store.add(trajectory(task))


def test_a_batch_is_the_first_complete_groups_and_the_rest_stays() -> None:
    store = GroupStore(batch_size=2, num_repeat=2)
    fill(store, "a", "b", "c", "c", "b")
    assert store.ready
    assert store.tasks() == {"c": 2, "b": 2, "a": 1}
    fill(store, "d", "d")
    batch = store.take()
    assert [(group.task_id, len(group.trajectories)) for group in batch.groups] == [("c", 2), ("b", 2)]
    assert not store.ready
    assert store.tasks() == {"d": 2, "a": 1}
    fill(store, "a")
    assert store.ready
    assert store.episodes == 4


def test_a_task_that_comes_again_makes_another_group() -> None:
    store = GroupStore(batch_size=2, num_repeat=2)
    fill(store, "a", "a", "a", "a")
    assert [len(group.trajectories) for group in store.take().groups] == [2, 2]


def test_a_batch_is_out_until_its_step_is_done() -> None:
    store = GroupStore(batch_size=1, num_repeat=1)
    fill(store, "a", "b")
    batch = store.take()
    with pytest.raises(StateError, match="still out"):
        store.take()
    assert store.confirm("another") is None
    assert store.confirm(batch.batch_id) is batch
    assert store.confirm(batch.batch_id) is None
    assert store.give_back() == 0
    assert store.take().groups[0].task_id == "b"


def test_a_batch_whose_step_died_goes_back_to_the_front() -> None:
    store = GroupStore(batch_size=2, num_repeat=1)
    fill(store, "a", "b", "c")
    first = store.take()
    assert store.give_back() == 2
    second = store.take()
    assert second.groups == first.groups
    assert second.batch_id != first.batch_id
    assert store.confirm(first.batch_id) is None


def test_clearing_forgets_partial_complete_and_outstanding_groups() -> None:
    store = GroupStore(batch_size=1, num_repeat=2)
    fill(store, "a", "a", "b", "b", "c")
    batch = store.take()
    store.lose("d")
    assert store.clear() == 5
    assert (store.tasks(), store.ready, store.confirm(batch.batch_id)) == ({}, False, None)


def test_nothing_to_take() -> None:
    store = GroupStore(batch_size=2, num_repeat=1)
    fill(store, "a")
    with pytest.raises(StateError, match="only 1 of 2"):
        store.take()


def test_a_lost_episode_drops_its_group_once_all_have_ended() -> None:
    store = GroupStore(batch_size=1, num_repeat=3)
    fill(store, "a", "a")
    assert store.lose("a") == 2
    assert not store.ready
    assert store.episodes == 0
    assert store.lose("a") == 0
    assert store.add(trajectory("a")) == 0
    assert store.add(trajectory("a")) == 2
    fill(store, "a", "a", "a")
    assert store.ready


def test_partial_groups_are_bounded() -> None:
    store = GroupStore(batch_size=1, num_repeat=2, max_partial_episodes=2)
    fill(store, "a", "b")
    assert store.add(trajectory("c")) == 1
    assert store.tasks() == {"b": 1, "c": 1}
    store.lose("d")
    assert store.tasks() == {"c": 1}
