"""Episodes whose data is deleted leave the collection, also from a batch that was taken."""

from __future__ import annotations

from swarm.job import TrainJob
from swarm.server.batching.collection import Collection
from tests.swarm.server.journal.build import trajectory

JOB = TrainJob(model="tiny", batch_size=2, num_repeat=2, max_response_length=100)


def filled(*tasks: str, job: TrainJob = JOB) -> Collection:
    collection = Collection(job)
    for task in tasks:
        finish(collection, task)
    return collection


def finish(collection: Collection, task: str) -> None:
    for number in range(2):
        collection.claimed("c", "train")
        collection.released("c", "train", "", "ended")
        collection.add("c", trajectory(f"{task}-{number}", task, reward=float(number)))


def test_what_waits_goes_with_its_group() -> None:
    collection = filled("hers", "his")
    assert collection.ready
    collection.forget({"hers-1"}, "deleted")
    assert collection.groups.tasks() == {"his": 2} and collection.dropped == 2 and not collection.ready


def test_a_batch_that_comes_back_is_without_it() -> None:
    collection = filled("hers", "his")
    first = collection.take()
    collection.forget({"hers-0", "hers-1"}, "deleted")
    assert collection.give_back()
    again = collection.take()
    assert again.batch_id == first.batch_id and [group.task_id for group in again.groups] == ["his"]
    assert collection.confirm(again.batch_id, 1) is not None
    assert (collection.trained, collection.dropped) == (2, 2)
    assert [(row.trained, row.dropped) for row in collection.rows()] == [(2, 2)]


def test_a_batch_of_nothing_else_is_no_batch() -> None:
    collection = filled("one", "two")
    collection.take()
    collection.forget({"one-0", "two-0"}, "deleted")
    assert not collection.give_back() and collection.outstanding is None and not collection.ready


def test_a_batch_that_was_decided_and_is_gone_decides_nothing_of_the_next() -> None:
    collection = filled("hers", job=JOB.model_copy(update={"collection": "any_client_agree_sync_weight"}))
    collection.agree("c")
    collection.seal()
    collection.forget({"hers-0"}, "deleted")
    assert not collection.ready and collection.in_vain
    collection.end_agreements()
    finish(collection, "his")
    assert not collection.ready, "nobody agrees"
