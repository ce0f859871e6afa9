from __future__ import annotations

import asyncio
import resource
import sys
import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from swarm.errors import ConfigError, UnavailableError
from swarm.http.serve import loop_factory
from swarm.server.journal import Journal
from swarm.server.journal.ledger import Changes
from swarm.server.journal.records import (
    BatchTaken,
    CallRecorded,
    EpisodeEnded,
    EpisodesDropped,
    PastEnding,
    Recovered,
    RunBegun,
)
from swarm.server.journal.writer import Writer
from tests.swarm.server.journal.build import batch, call, claimed, ended, refused, step, trajectory

pytestmark = pytest.mark.anyio

JOURNAL = "swarm.server.journal.journal"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
async def journal(path: Path) -> AsyncGenerator[Journal]:
    journal = Journal.open(path)
    yield journal
    await journal.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who wait for the disk do not wait for long."""
    monkeypatch.setattr(f"{JOURNAL}.SYNC_SECONDS", 0.3)


@contextmanager
def full_disk(path: Path) -> Generator[None]:
    """No file of this process may grow: the next commit fails in a real write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    wal = path.with_name("journal.db-wal")
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_empty_journal_recovers_to_nothing(path: Path) -> None:
    journal = Journal.open(path)
    assert journal.recover() == Recovered()
    asyncio.run(journal.close())


async def test_what_is_synced_is_there_for_another_connection(journal: Journal) -> None:
    journal.append(RunBegun("r", "job"), claimed("a"), call("a", "1"), claimed("b"))
    assert journal.pending == 4
    await journal.synced()
    assert journal.pending == 0
    found = journal.recover()
    assert [one.claim.episode_uuid for one in found.claimed] == ["a", "b"]
    assert found.claimed[0].calls == (call("a", "1").call,)
    assert (found.run_id, found.job_yaml) == ("r", "job")


async def test_synced_returns_at_once_when_nothing_is_pending(journal: Journal) -> None:
    async with asyncio.timeout(0):
        await journal.synced()


async def test_hundreds_who_wait_share_commits(journal: Journal) -> None:
    async def one(number: int) -> None:
        journal.append(claimed(f"e{number}"))
        await journal.synced()
        journal.append(ended(f"e{number}"))
        await journal.synced()

    await asyncio.gather(*(one(number) for number in range(300)))
    stats = journal.stats()
    assert (stats.records, stats.pending, stats.error) == (600, 0, "")
    assert stats.commits < 100
    assert {one.episode_uuid for _, one in journal.recover().finished} == {f"e{n}" for n in range(300)}


async def test_what_one_turn_of_the_loop_appends_is_one_commit(journal: Journal) -> None:
    told: list[tuple[int, int]] = []

    def one(number: int) -> None:
        journal.append(claimed(f"e{number}"))
        journal.on_disk(lambda error: told.append((number, journal.stats().commits)))

    for number in range(20):
        asyncio.get_running_loop().call_soon(one, number)
    await asyncio.sleep(0)
    await journal.synced()
    assert told == [(number, 1) for number in range(20)], "all are acknowledged together, in order"
    journal.append(claimed("alone"))
    await journal.synced()
    assert journal.stats().commits == 2, "who is alone waits for nobody"


async def test_what_was_just_appended_when_the_server_ends_is_written(path: Path) -> None:
    journal = Journal.open(path)
    journal.append(claimed("a"))
    await journal.synced()
    journal.append(ended("a"))
    waiting = asyncio.create_task(journal.synced())
    closing = asyncio.create_task(journal.close())
    await asyncio.gather(waiting, closing)
    again = Journal.open(path)
    assert [one.episode_uuid for _, one in again.recover().finished] == ["a"]
    await again.close()


async def test_a_commit_of_claims_calls_and_ends_is_one_statement(journal: Journal) -> None:
    statements: set[str] = set()
    connection = journal._connection  # pyright: ignore[reportPrivateUsage]
    connection.set_trace_callback(statements.add)
    journal.append(claimed("a"), call("a", "1"), claimed("b"), ended("a"))
    await journal.synced()
    connection.set_trace_callback(None)
    assert [text[:6] for text in statements] == ["INSERT"]
    assert [one.claim.episode_uuid for one in journal.recover().claimed] == ["b"]
    assert [one.episode_uuid for _, one in journal.recover().finished] == ["a"]


async def test_one_who_gives_up_takes_nobody_along(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, may_commit = Writer._commit, threading.Event()

    def held(self: Writer, changes: Changes) -> bool:
        assert may_commit.wait(10)
        return commit(self, changes)

    monkeypatch.setattr(Writer, "_commit", held)
    journal.append(claimed("a"))
    tasks = [asyncio.create_task(journal.synced()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    may_commit.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert done[0] is done[2] is None
    assert isinstance(done[1], asyncio.CancelledError)


async def test_closing_writes_what_is_pending(path: Path) -> None:
    journal = Journal.open(path)
    journal.append(*(claimed(f"e{n}") for n in range(500)))
    await journal.close()
    await journal.close()
    again = Journal.open(path)
    assert len(again.recover().claimed) == 500
    await again.close()
    assert not path.with_name("journal.db-wal").exists()


async def test_what_is_appended_together_is_written_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    commit = Writer._commit

    def counting(self: Writer, changes: Changes) -> bool:
        sizes.append(len(changes.rows))
        return commit(self, changes)

    monkeypatch.setattr(Writer, "_commit", counting)
    journal = Journal.open(path)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(200):
            journal.append(*(claimed(f"{number}-{member}") for member in range(4)))
            await journal.synced()
    finally:
        sys.setswitchinterval(interval)
        await journal.close()
    assert sum(sizes) == 800
    assert not [size for size in sizes if size % 4], "a server killed now would know a part of a claimed group"


@pytest.mark.parametrize("handed_over", [True, False], ids=["the writer has it", "the writer does not have it"])
def test_a_server_that_stood_still_blames_no_disk_that_was_in_time(
    path: Path, impatient: None, handed_over: bool
) -> None:
    # the very event loop that serves: uvloop looks at its timers before it looks at what other threads have told it
    told: list[UnavailableError | None] = []

    async def stand_still() -> None:
        journal = Journal.open(path)
        journal.append(claimed("a"))
        answered = asyncio.Event()

        def tell(error: UnavailableError | None) -> None:
            told.append(error)
            answered.set()

        journal.on_disk(tell)
        if handed_over:
            await asyncio.sleep(0)
        too_late = time.monotonic() + 0.6
        while (handed_over and journal.pending) or time.monotonic() < too_late:
            pass
        await answered.wait()
        await journal.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(asyncio.wait_for(stand_still(), 60))
    assert told == [None]


async def test_a_full_disk_refuses_and_recovers_in_order(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append(claimed("a"), claimed("b"))
    await journal.synced()
    monkeypatch.setattr(f"{JOURNAL}.SYNC_SECONDS", 0.3)
    with full_disk(path):
        journal.append(ended("a", tokens=5000))
        with pytest.raises(UnavailableError) as caught:
            await journal.synced()
        assert caught.value.code == "journal_unavailable"
        assert caught.value.should_retry
        journal.append(ended("b"))
        stats = journal.stats()
        assert stats.pending == 2
        assert stats.oldest_pending_seconds >= 0.2
        assert stats.error in caught.value.message
        assert stats.error
        assert journal.recover().finished == []
    monkeypatch.undo()
    await journal.synced()
    assert [one.episode_uuid for _, one in journal.recover().finished] == ["a", "b"]
    assert journal.stats().error == ""
    assert journal.stats().oldest_pending_seconds == 0.0


async def test_a_disk_that_stays_full_does_not_hold_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("swarm.server.journal.journal._CLOSE_SECONDS", 0.2)
    journal = Journal.open(path)
    journal.append(claimed("a"))
    await journal.synced()
    with full_disk(path):
        journal.append(ended("a", tokens=5000))
        await journal.close()
    assert "1 journal records could not be written" in caplog.text
    again = Journal.open(path)
    assert [one.claim.episode_uuid for one in again.recover().claimed] == ["a"]
    await again.close()


@pytest.mark.usefixtures("impatient")
async def test_what_follows_a_transaction_that_was_given_up_is_given_up_too(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("swarm.server.journal.journal._CLOSE_SECONDS", 0.2)
    # the disk has room again as soon as the writer has given up
    monkeypatch.setattr("swarm.server.journal.writer._RETRY_FIRST", 100.0)
    journal = Journal.open(path)
    journal.append(claimed("a"))
    await journal.synced()
    with full_disk(path):
        journal.append(ended("a", tokens=5000))
        with pytest.raises(UnavailableError):
            await journal.synced()
    journal.append(claimed("b"))
    told = asyncio.create_task(journal.synced())
    await journal.close()
    with pytest.raises(UnavailableError):
        await told
    assert "2 journal records could not be written" in caplog.text
    again = Journal.open(path)
    assert [one.claim.episode_uuid for one in again.recover().claimed] == ["a"]
    await again.close()


@pytest.mark.usefixtures("impatient")
async def test_a_record_that_cannot_be_written_is_an_error_that_is_told(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    journal.append(claimed("a"))
    await journal.synced()
    unwritable = structs.replace(call("a", "1").call, finish_reason=object())
    journal.append(CallRecorded("a", unwritable), ended("a"))
    with pytest.raises(UnavailableError, match="can not serialize"):
        await journal.synced()
    assert "TypeError" in journal.stats().error
    assert journal.pending == 2


def test_a_damaged_file_is_named(path: Path) -> None:
    journal = Journal.open(path)
    journal.append(*(claimed(f"e{n}") for n in range(50)))
    asyncio.run(journal.close())
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"cannot read the journal .*journal\.db"):
        Journal.open(path)


async def test_past_endings(journal: Journal) -> None:
    journal.append(claimed("a"), claimed("b", client="d", episode_type="eval"), claimed("c"), claimed("w"))
    journal.append(refused("a", "no call"), EpisodeEnded("b", "d", "capped", 5.0), ended("w", end_key="k"))
    journal.append(EpisodesDropped(["w"], "stale"))
    await journal.synced()
    assert await journal.past_ending("a") == PastEnding("c", "ended", "no call", "", "train", 1.6e9)
    assert await journal.past_ending("b") == PastEnding("d", "capped", "", "", "eval", 5.0)
    # the answer to a repeated end is the first one: that it was dropped later does not change it
    assert await journal.past_ending("w") == PastEnding("c", "ended", "", "k", "train", 1.6e9)
    assert await journal.past_ending("c") is None
    assert await journal.past_ending("never") is None


async def test_past_claims(journal: Journal) -> None:
    journal.append(claimed("a", claim_key="k"), claimed("b", client="d", claim_key="k"))
    journal.append(claimed("g1", claim_key="g", group_uuid="G"), claimed("g2", claim_key="g", group_uuid="G"))
    # nobody waited for it any more, so the key was forgotten and used again
    journal.append(
        claimed("o", claim_key="twice"), EpisodeEnded("o", "c", "engine", 1.0), claimed("n", claim_key="twice")
    )
    await journal.synced()
    assert journal.recover().claims == {
        ("c", "k"): ["a"],
        ("d", "k"): ["b"],
        ("c", "g"): ["g1", "g2"],
        ("c", "twice"): ["n"],
    }


async def test_an_outstanding_batch_comes_back_as_it_was_until_its_step(journal: Journal) -> None:
    uuids = ["a", "b", "c", "d"]
    taken = batch("b1", t=["d", "a"], u=["b"])
    journal.append(RunBegun("r", ""), *map(claimed, uuids))
    journal.append(*(ended(uuid, "u" if uuid == "b" else "t") for uuid in uuids), BatchTaken(taken))
    await journal.synced()
    found = journal.recover()
    assert found.outstanding is not None
    assert found.outstanding.batch == taken
    assert found.finished == [("c", trajectory("c"))]
    journal.append(step("b1"), step("b1"))
    await journal.synced()
    found = journal.recover()
    assert found.outstanding is None
    assert (found.trained, found.steps) == (3, [step("b1").result])


async def test_a_second_batch_gives_the_first_one_back(journal: Journal) -> None:
    journal.append(claimed("a"), claimed("b"), ended("a"), ended("b"))
    journal.append(BatchTaken(batch("b1", t=["a", "b"])), BatchTaken(batch("b2", t=["b"])), step("b1"))
    await journal.synced()
    found = journal.recover()
    assert found.outstanding is not None
    assert found.outstanding.batch == batch("b2", t=["b"])
    assert [one.episode_uuid for _, one in found.finished] == ["a"]
    assert found.trained == 0


async def test_any_name_that_a_body_can_carry_is_stored(journal: Journal) -> None:
    journal.append(claimed("a", client="\ud800"), ended("a", task_id="\udfff\0"))
    await journal.synced()
    assert journal.recover().finished == [("?", trajectory("a", "\udfff\0"))]


class Held:
    """A disk that hangs until it is let go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self.let_go.wait(60)

    close = __call__


@pytest.fixture
def held() -> Generator[Held]:
    held = Held()
    yield held
    held.let_go.set()


@pytest.mark.usefixtures("impatient")
async def test_a_disk_that_hangs_holds_neither_who_asks_nor_the_end(
    path: Path, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"{JOURNAL}.past_ending", held)
    monkeypatch.setattr(f"{JOURNAL}._CLOSE_SECONDS", 0.2)
    journal = Journal.open(path)
    journal.append(claimed("a"))
    await journal.synced()
    with pytest.raises(UnavailableError, match=r"cannot be read: no answer within 0\.3 s"):
        await journal.past_ending("a")
    assert held.reached.is_set()
    await asyncio.wait_for(journal.close(), 60)
    assert "the disk hangs" in caplog.text
    again = Journal.open(path)
    assert [one.claim.episode_uuid for one in again.recover().claimed] == ["a"]
    held.let_go.set()
    monkeypatch.undo()
    await again.close()


async def test_a_disk_that_hangs_at_the_very_last_does_not_hold_the_end(
    path: Path, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal.open(path)
    journal.append(claimed("a"))
    await journal.synced()
    connection = journal._connection  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(journal, "_connection", held)
    monkeypatch.setattr(f"{JOURNAL}._CLOSE_SECONDS", 0.2)
    await asyncio.wait_for(journal.close(), 60)
    assert held.reached.is_set()
    assert "the disk hangs" in caplog.text
    connection.close()


async def test_who_has_given_up_is_not_told(path: Path, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(path)
    monkeypatch.setattr(f"{JOURNAL}.past_ending", held)
    first = asyncio.create_task(journal.past_ending("a"))
    second = asyncio.create_task(journal.past_ending("b"))
    await asyncio.to_thread(held.reached.wait, 60)
    for one in (first, second):
        one.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    held.let_go.set()
    monkeypatch.undo()
    assert await journal.past_ending("never") is None, "the thread lives"
    await journal.close()
