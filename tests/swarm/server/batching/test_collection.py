"""The parts together: rows, agreements, claims that wait, and when they are worth trying again."""

from __future__ import annotations

from typing import get_args

import pytest

from swarm.job import CollectionMethod
from swarm.protocol import SwarmThrottlePolicy
from swarm.server.batching.collection import Collection
from tests.swarm.server.batching.conftest import Clock, job, trajectory

THIRD = SwarmThrottlePolicy(ratio=0.5, current_task_id="more")


def run(collection: Collection, client: str, *tasks: str) -> None:
    for task in tasks:
        collection.claimed(client, "train", task)
        collection.released(client, "train", task, "ended")
        collection.add(client, trajectory(task))
        assert collection.dropped == 0


def test_a_claim_beyond_its_share_waits_until_the_batch_is_taken_or_the_other_is_gone(clock: Clock) -> None:
    collection = Collection(job(), 100.0, clock)
    collection.seen("other", train=True)
    run(collection, "me", "a", "a")
    collection.claimed("other", "train", "theirs", 2)
    refusal = collection.admit("me", "train", 1, THIRD)
    assert refusal.startswith("throttled: ")
    assert [(row.throttled, row.groups) for row in collection.rows()] == [(False, 1), (True, 1)]
    assert collection.admit("me", "eval", 1, THIRD) == ""
    assert collection.admit("me", "train", 1, None) == ""
    change = collection.next_change()
    assert change is not None
    clock.now = change
    assert collection.admit("me", "train", 1, THIRD) == "", "the other is gone"
    collection.seen("other", train=True)
    assert collection.admit("me", "train", 1, THIRD)
    for _ in range(2):
        collection.released("other", "train", "theirs", "ended")
        collection.add("other", trajectory("theirs"))
    collection.take()
    assert collection.admit("me", "train", 1, THIRD) == ""
    assert collection.next_change() is None


@pytest.mark.parametrize("method", get_args(CollectionMethod))
def test_a_job_says_of_its_method_what_the_method_says(method: CollectionMethod) -> None:
    """Commands that have the job alone ask it whether a batch waits for agreement."""
    declared = job(collection=method)
    assert declared.by_agreement == Collection(declared, 100.0).method.by_agreement


def test_time_in_which_the_engine_does_not_roll_does_not_count(clock: Clock) -> None:
    collection = Collection(job(batch_size=1, collection="all_clients_agree_sync_weight"), 100.0, clock)
    run(collection, "other", "b")
    run(collection, "me", "a", "a")
    assert collection.agree("me") == ""
    collection.follow(False)
    clock.now += 1000
    assert not collection.ready
    assert collection.next_change() is None
    assert {row.idle_seconds for row in collection.rows()} == {1000}
    collection.follow(True)
    change = collection.next_change()
    assert change == pytest.approx(clock.now + 100, abs=0.01)
    clock.now += 99
    assert not collection.ready
    clock.now = change
    assert collection.ready


def test_a_batch_that_is_decided_stays_ready_though_another_client_turns_up(clock: Clock) -> None:
    collection = Collection(job(collection="all_clients_agree_sync_weight"), 100.0, clock)
    run(collection, "me", "a", "a")
    collection.agree("me")
    run(collection, "other", "b")
    assert not collection.ready
    collection.agree("other")
    collection.seal()
    run(collection, "third", "c")
    assert collection.ready


def test_a_batch_that_is_sent_again_decides_nothing_about_the_next(clock: Clock) -> None:
    collection = Collection(job(collection="any_client_agree_sync_weight"), 100.0, clock)
    run(collection, "me", "a", "a")
    collection.agree("me")
    collection.seal()
    batch = collection.take()
    collection.give_back()
    collection.seal()
    assert collection.take() is batch
    collection.confirm(batch.batch_id)
    run(collection, "me", "b", "b")
    assert not collection.ready, "nobody has agreed yet"
    collection.agree("me")
    assert collection.ready
