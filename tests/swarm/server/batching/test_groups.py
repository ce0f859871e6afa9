"""What only single cases show of groups: why they are dropped, in words, and bounds. The rest is the state machine's
(``test_machine.py``)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from swarm.server.batching.collection import Collection
from swarm.server.journal.rows import GroupRow, JournalRow, StateRow
from swarm.states import EpisodeState
from tests.swarm.server.batching.conftest import Clock, job, trajectory


def store(rows: list[JournalRow] | None = None, **more: Any) -> Collection:
    told: list[JournalRow] = [] if rows is None else rows
    collection = Collection(job(**more), clock=Clock(), append=lambda *new: told.extend(new))
    collection.seen("me")
    return collection


def fill(collection: Collection, *tasks: str) -> None:
    for task in tasks:
        collection.add("me", trajectory(task))


def failed(collection: Collection) -> None:
    fill(collection, "a", "a")
    batch = collection.take().batch_id
    for _ in range(3):
        collection.fail(batch, "out of memory")


def lost(collection: Collection) -> None:
    fill(collection, "a")
    collection.lose("a")


def uninformative(collection: Collection) -> None:
    fill(collection, "a", "a")


def stale(collection: Collection) -> None:
    fill(collection, "a")
    collection.advance(2)


def evicted(collection: Collection) -> None:
    fill(collection, "a", "b", "c", "d")
    assert collection.admit("me", "train", 1, None) == ""


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
    rows: list[JournalRow] = []
    dropping = store(rows, batch_size=1, max_cached_episodes=1, collection=collection)
    drop(dropping)
    (row,) = [row for row in rows if isinstance(row, StateRow) and row.state is EpisodeState.DROPPED]
    assert (row.cause, row.reason) == (drop.__name__, words)
    (client,) = dropping.rows()
    assert client.dropped == len(row.episode_uuids) > 0
    assert row.tokens == client.dropped, "each has one token"


def test_losses_without_a_finished_episode_are_bounded() -> None:
    collection = store(batch_size=1, max_cached_episodes=1)
    for n in range(collection.bound + 1):
        collection.lose(f"t{n}")
    fill(collection, "t0", "t0", f"t{collection.bound}")
    assert collection.groups.tasks() == {"t0": 2}, "the oldest loss was forgotten, the latest was not"


def test_a_group_of_losses_that_is_whole_beyond_the_bound_is_dropped_once() -> None:
    collection = store(batch_size=1, max_cached_episodes=1)
    for n in range(collection.bound):
        collection.lose(f"t{n}")
    fill(collection, "another")
    for _ in range(2):
        collection.lose("t0")
    fill(collection, "t1", "t0")
    assert collection.groups.tasks() == {"another": 1, "t1": 1}, "only the oldest other group of losses was forgotten"


def test_losses_end_with_their_group_and_with_their_run() -> None:
    rows: list[JournalRow] = []
    collection = store(rows, batch_size=1)
    for _ in range(2):
        collection.lose("a")
    fill(collection, "a", "a")
    assert collection.ready, "another group of the same task"
    collection.lose("b")
    collection.begin_run("r", "another run")
    assert [(row.task_id, row.lost) for row in rows if isinstance(row, GroupRow)][-2:] == [("b", 1), ("b", 0)]
    fill(collection, "b", "b")
    assert collection.ready


def test_a_group_with_equal_rewards_and_a_credit_teaches_something() -> None:
    collection = store(batch_size=1, collection="finish_enough_non_dummy_tasks")
    collection.add("me", trajectory("a", reward=1.0))
    collection.add("me", structs.replace(trajectory("a", reward=1.0), credit=-0.5))
    assert collection.ready
