import pytest

from swarm.server.journal.codec import pack_json
from swarm.server.journal.incoming import Kind
from swarm.server.journal.ledger import Ledger
from swarm.server.journal.records import BatchTaken, EpisodeEnded, EpisodesDropped, Record, RunBegun
from swarm.types import WorkflowOutput
from tests.swarm.server.journal.build import batch, call, claimed, ended, refused, step

#: one life of everything: three episodes are trained, one is dropped later, two at their end
LIFE: list[Record] = [
    RunBegun("r", ""),
    *(claimed(name) for name in "abcdef"),
    call("a", "1"),
    *(ended(name) for name in "abcd"),
    refused("e"),
    refused("f"),
    EpisodesDropped(["d"], "stale"),
    BatchTaken(batch("b", t=["a", "b", "c"])),
    step("b"),
]


def counts(ledger: Ledger) -> tuple[int, int, int, int]:
    return ledger.run.trained, ledger.run.dropped, ledger.over, len(ledger.live)


def test_each_episode_counts_once() -> None:
    ledger = Ledger()
    ledger.fold(LIFE)
    assert counts(ledger) == (3, 3, 6, 0)


def test_each_record_said_twice_counts_once() -> None:
    ledger = Ledger()
    ledger.fold([record for record in LIFE for _ in range(2)])
    assert counts(ledger) == (3, 3, 6, 0)


def test_a_whole_life_said_again_changes_nothing_on_disk() -> None:
    ledger = Ledger()
    ledger.fold(LIFE)
    again = ledger.fold(LIFE)
    assert counts(ledger) == (3, 3, 6, 0)
    assert not (again.rows or again.moves or again.batches)


def test_a_batch_said_again_after_it_was_trained_is_not_out() -> None:
    ledger = Ledger()
    ledger.fold(LIFE)
    ledger.fold([BatchTaken(batch("b", t=["a", "b", "c"]))])
    assert not ledger.batch
    ledger.fold([claimed("x"), ended("x"), BatchTaken(batch("c", t=["x"]))])
    ledger.fold([BatchTaken(batch("b", t=["a", "b", "c"])), step("c", 2)])
    assert ledger.run.trained == 4


def test_a_batch_of_which_nothing_is_left_is_gone() -> None:
    ledger = Ledger()
    ledger.fold([claimed("a"), claimed("b"), ended("a"), ended("b"), BatchTaken(batch("b", t=["a", "b"]))])
    assert ledger.fold([EpisodesDropped(["a"], "one")]).batches == {}
    assert ledger.fold([EpisodesDropped(["b"], "other")]).batches == {"b": None}
    ledger.fold([step("b")])
    assert counts(ledger) == (0, 2, 2, 0)


@pytest.mark.parametrize("metadata", [{}, {"answer": "ä"}])
@pytest.mark.parametrize("success", [None, True, False])
@pytest.mark.parametrize("reward", [0.0, -1.5, 1e-300, 1 / 3, 2.0**70])
def test_a_result_is_kept_as_json_of_all_it_says(reward: float, success: bool | None, metadata: dict[str, str]) -> None:
    output = WorkflowOutput(reward=reward, is_success=success, metadata=metadata)
    ledger = Ledger()
    changes = ledger.fold([claimed("a"), EpisodeEnded("a", "c", "ended", 1.6e9, "t", output)])
    assert changes.rows[1][8] == pack_json(output.model_dump())


def test_changes_are_absolute() -> None:
    ledger = Ledger()
    first = ledger.fold(LIFE)
    assert first.runs[1][3:6] == (3, 3, 0)
    assert [row[1] for row in first.rows if row[0] == Kind.CLAIM] == [1, 2, 3, 4, 5, 6]
    assert [row[1] for row in first.rows if row[0] == Kind.END and row[12]] == [1]
