from __future__ import annotations

import asyncio
import contextlib
import resource
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from swarm.errors import ConfigError, UnavailableError
from swarm.http.serve import loop_factory
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import CallRow, Ending
from swarm.tokens import TrainBatch, TrainGroup
from swarm.types import Notes
from tests.swarm.server.journal.build import call, claimed, dropped, ended, over, refused, taken

pytestmark = pytest.mark.anyio

JOURNAL = "swarm.server.journal.journal"
WRITER = "swarm.server.journal.writer"


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
    monkeypatch.setattr(f"{JOURNAL}.CLOSE_SECONDS", 0.2)


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
    acknowledged: list[tuple[int, int]] = []

    async def one(number: int) -> None:
        journal.append(claimed(f"e{number}"))
        journal.append(ended(f"e{number}"))
        await journal.synced()
        acknowledged.append((number, journal.stats().commits))

    await asyncio.gather(*(one(number) for number in range(20)))
    assert acknowledged == [(number, 1) for number in range(20)], "all are acknowledged together, in order"
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


async def test_closing_writes_what_is_pending(path: Path) -> None:
    journal = Journal.open(path)
    journal.append(*(claimed(f"e{n}") for n in range(500)))
    await journal.close()
    await journal.close()
    again = Journal.open(path)
    assert len(again.recover().claimed) == 500
    await again.close()
    assert not path.with_name("journal.db-wal").exists()


@pytest.mark.parametrize("written", [True, False], ids=["the writer has it", "the writer does not have it"])
def test_a_server_that_stood_still_blames_no_disk_that_was_in_time(path: Path, impatient: None, written: bool) -> None:
    # the very event loop that serves: uvloop looks at its timers before it looks at what other threads have told it
    async def stand_still() -> None:
        journal = Journal.open(path)

        def block() -> None:
            too_late = time.monotonic() + 0.6
            while (written and journal.stats().pending) or time.monotonic() < too_late:
                pass

        loop = asyncio.get_running_loop()
        # before the turn in which the writer gets the row, or after it
        loop.call_soon(*((loop.call_soon, block) if written else (block,)))
        journal.append(claimed("a"))
        await journal.synced()
        await journal.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(asyncio.wait_for(stand_still(), 60))


@pytest.mark.usefixtures("impatient")
async def test_a_full_disk_refuses_and_recovers_in_order(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append(claimed("a"), claimed("b"))
    await journal.synced()
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
        assert stats.error and stats.error == journal.error
        assert journal.recover().finished == []
    monkeypatch.undo()
    await journal.synced()
    assert [one.episode_uuid for _, one in journal.recover().finished] == ["a", "b"]
    assert journal.stats().error == "" == journal.error
    assert journal.stats().oldest_pending_seconds == 0.0


async def test_a_journal_whose_row_waits_long_for_the_disk_is_behind(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.server.journal.journal.BEHIND_SECONDS", 1000.0)
    journal.append(claimed("a"))
    assert not journal.behind, "it has just been appended"
    monkeypatch.setattr("swarm.server.journal.journal.BEHIND_SECONDS", 0.0)
    assert journal.behind
    await journal.synced()
    assert not journal.behind


@pytest.mark.usefixtures("impatient")
async def test_a_disk_that_stays_full_does_not_hold_the_end(path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    # the disk has room again as soon as the writer has given up
    monkeypatch.setattr(f"{WRITER}.RETRY_FIRST", 100.0)
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


async def test_notes_that_are_nested_too_deeply_are_left_out(journal: Journal) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"deeper": deep}
    journal.append(claimed("a"), over("a", "aborted", notes=Notes.model_construct(task=deep)))
    await journal.synced()
    assert not journal.stats().error


@pytest.mark.usefixtures("impatient")
async def test_a_record_that_cannot_be_written_is_an_error_that_is_told(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    journal.append(claimed("a"))
    await journal.synced()
    unwritable = structs.replace(call("a", "1").call, finish_reason=object())
    journal.append(CallRow("a", unwritable), ended("a"))
    with pytest.raises(UnavailableError, match="can not serialize"):
        await journal.synced()
    assert "TypeError" in journal.stats().error
    assert journal.stats().pending == 2


def test_a_damaged_file_is_named(path: Path) -> None:
    journal = Journal.open(path)
    journal.append(*(claimed(f"e{n}") for n in range(50)))
    asyncio.run(journal.close())
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"cannot read the journal .*journal\.db"):
        Journal.open(path)


@pytest.mark.parametrize("members", ['[["t", ["gone"]]]', "[1]", "{"])
async def test_a_damaged_batch_is_named(path: Path, members: str) -> None:
    journal = Journal.open(path)
    end = ended("a")
    assert end.trajectory is not None
    batch = TrainBatch(batch_id="b", groups=[TrainGroup(task_id="t", trajectories=[end.trajectory])])
    journal.append(claimed("a"), end, *taken(batch))
    await journal.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE batch SET members = ?", (members,))
        connection.commit()
    journal = Journal.open(path)
    with pytest.raises(ConfigError, match="cannot read the journal"):
        journal.recover()
    await journal.close()


async def test_past_endings(journal: Journal) -> None:
    journal.append(claimed("a"), claimed("b", client="d", episode_type="eval"), claimed("c"), claimed("w"))
    journal.append(refused("a", "no call"), over("b", "capped", client="d"), ended("w", end_key="k"), dropped("w"))
    keys = (claimed("a").key_digest,)
    # it sees what was appended before
    assert await journal.past_ending("a") == Ending("c", "ended", "no call", keys=keys)
    assert await journal.past_ending("b") == Ending("d", "capped", keys=keys)
    # the answer to a repeated end is the first one: that it was dropped later does not change it
    assert await journal.past_ending("w") == Ending("c", "ended", "", "k", keys=keys)
    assert await journal.past_ending("c") is None
    assert await journal.past_ending("never") is None


@pytest.mark.usefixtures("impatient")
async def test_a_disk_that_hangs_holds_neither_who_asks_nor_the_end(
    path: Path, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("swarm.server.journal.journal.past_ending", held)
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


async def test_who_has_given_up_is_not_told(path: Path, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(path)
    monkeypatch.setattr("swarm.server.journal.journal.past_ending", held)
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
