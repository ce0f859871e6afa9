"""What is deleted of a subject is gone from the journal's bytes, also after a kill or a restore."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import random
import shutil
import sqlite3
import struct
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import ConfigError, UnavailableError
from swarm.server.journal import erasure
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import CallRow, JournalRow, RunRow
from swarm.subjects import Subject, Tombstone
from swarm.tokens import ModelCall
from swarm.types import Notes, WorkflowOutput
from tests.swarm.server.journal.build import batch, claimed, dropped, ended_with, over, stepped, taken
from tests.token_data import model_call

pytestmark = pytest.mark.anyio

HERS, ALL = Subject(key="hers"), 2e9


def said(name: str, words: str = "") -> WorkflowOutput:
    key = name.rpartition("-")[0]
    task = {"main_query": f"text of {name}. " + words, "metadata": {"odd": float("inf")}}
    notes = Notes(key=key, request_id=f"request-{name}.", session="s", reason=f"reason of {name}.", task=task)
    return WorkflowOutput(reward=1.0, notes=notes)


def sampled(name: str, tokens: int) -> ModelCall:
    """A call whose first tokens are of this name alone."""
    ids = [*struct.unpack("<3I", hashlib.md5(name.encode()).digest()[:12]), *range(tokens - 3)]
    return model_call(range(5), [one & 0x7FFF_FFFF for one in ids], 1, 2, call_id=f"call {name}.")


def episode(name: str, tokens: int, words: str = "") -> list[JournalRow]:
    row = CallRow(name, sampled(name, tokens))
    return [claimed(name), row, ended_with(row, name, output=said(name, words))]


def traces(folder: Path, name: str) -> set[str]:
    forms = [f"{name}.".encode(), f"{name}. ".encode(), sampled(name, 3).response_ids.tobytes()]
    return {path.name for path in folder.iterdir() if any(form in path.read_bytes() for form in forms)}


def stone(subject: Subject = HERS, until: float = ALL) -> Tombstone:
    return Tombstone(id=f"stone of {subject}", subject=subject, until=until)


async def filled(path: Path, seed: int, count: int = 150) -> tuple[Journal, list[str]]:
    """A journal with episodes of two keys, most of which end long after their claim; the names of hers."""
    random_ = random.Random(seed)
    journal = Journal.open(path)
    journal.append(RunRow("r", ""))
    names = [f"{random_.choice(['hers', 'his'])}-{seed}{number:05}" for number in range(count)]
    rows = [episode(name, random_.choice([3, 40, 900]), "w" * random_.randrange(2000)) for name in names]
    for claim, sampled, _ in rows:
        journal.append(claim, sampled)
    random_.shuffle(rows)
    for _, _, end in rows:
        journal.append(end)
        await journal.synced()
    return journal, [name for name in names if name.startswith("hers")]


async def test_a_note_of_an_export_that_a_full_disk_cut_off_holds_up_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal, _ = await filled(path, 1, 5)
    await journal.close()
    before = path.read_bytes()
    journal = Journal.open(path)
    erasure.note_export(path, "first.parquet")
    with (tmp_path / erasure.EXPORTS).open("ab") as file:
        file.write(b'{"what": "refused.par')
    erasure.note_export(path, "second.parquet")
    assert (await journal.report(HERS)).exports == ["first.parquet", "second.parquet"]
    assert (await journal.erase(stone())).exports == ["first.parquet", "second.parquet"]
    await journal.close()
    # a copy from before that: it is deleted there when a server starts
    path.write_bytes(before)
    journal = Journal.open(path)
    assert not (await journal.report(HERS)).episodes
    await journal.close()


async def test_whose_it_is_is_found_however_deeply_a_result_is_nested(tmp_path: Path) -> None:
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"a": nested}
    journal = Journal.open(tmp_path / "journal.db")
    given = said("hers-1")
    assert given.notes is not None
    notes = given.notes.model_copy(update={"task": nested})
    outputs = given.model_copy(update={"metadata": nested}), given.model_copy(update={"notes": notes})
    for name, output in zip(("hers-1", "hers-2"), outputs, strict=True):
        row = CallRow(name, sampled(name, 3))
        journal.append(claimed(name), row, ended_with(row, name, output=output))
    journal.append(claimed("hers-3"), over("hers-3", "aborted", notes=notes))
    await journal.synced()
    assert sum((await journal.erase(stone())).episodes.values()) == 3
    assert not (await journal.report(HERS)).episodes
    await journal.close()
    assert not any(traces(tmp_path, name) for name in ("hers-1", "hers-2"))


@pytest.mark.parametrize("seed", range(3))
async def test_no_byte_of_what_is_deleted_is_left_and_all_else_is(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "journal.db"
    journal, hers = await filled(path, seed)
    his = [one.episode_uuid for _, one in journal.recover().finished if one.episode_uuid.startswith("his")]
    assert all(traces(tmp_path, name) for name in hers)
    found = await journal.report(HERS)
    assert found.episodes == {"waiting": len(hers)} and len(found.requests) == len(hers)
    await journal.erase(stone())
    assert [name for name in hers if traces(tmp_path, name)] == []
    assert [one.episode_uuid for _, one in journal.recover().finished] == his
    # pages that SQLite has in memory are written again
    journal.append(*(row for number in range(50) for row in episode(f"more-{number}", 40, "w" * 1500)))
    journal.append(dropped(*his[::2]))
    await journal.synced()
    await journal.close()
    assert [name for name in hers if traces(tmp_path, name)] == []
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_the_tokens_of_what_is_given_up_are_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.server.journal.writer.IDLE_SECONDS", 0.05)
    monkeypatch.setattr("swarm.server.journal.writer.AGE_SECONDS", 0.05)
    # on a busy machine the first time takes a second, and the next is minutes later
    monkeypatch.setattr("swarm.server.journal.writer.ANEW_SHARE", 1.0)
    random_ = random.Random(1)
    journal = Journal.open(tmp_path / "journal.db")
    journal.append(RunRow("r", ""))
    running: list[tuple[str, list[JournalRow]]] = []
    given_up: list[str] = []
    for number in range(300):
        name = f"{random_.choice(['private', 'his'])}-{number:03}"
        running.append((name, episode(name, random_.choice([3, 40, 900]))))
        journal.append(*running[-1][1][:2])
        # with others before and after it, and some on the same page
        while len(running) > (20 if number < 299 else 0):
            name, rows = running.pop(random_.randrange(len(running)))
            private = name.startswith("private")
            journal.append(over(name, "aborted", drop_reason="private_data") if private else rows[-1])
            given_up += [name] if private else []
        if number % 3 == 0:
            await journal.synced()
    assert len(given_up) > 100

    def left() -> list[str]:
        content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        return [name for name in given_up if sampled(name, 3).response_ids.tobytes() in content]

    deadline = time.monotonic() + 60
    while left():
        assert time.monotonic() < deadline, left()
        await asyncio.sleep(0.1)
    await journal.close()


async def test_a_restored_journal_is_cleared_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal, hers = await filled(path, 7, 40)
    await journal.close()
    shutil.copy(path, tmp_path / "copy")
    journal = Journal.open(path)
    await journal.erase(stone())
    await journal.close()
    (tmp_path / "copy").replace(path)
    assert traces(tmp_path, hers[0])
    journal = Journal.open(path)
    assert [name for name in hers if traces(tmp_path, name)] == []
    assert (await journal.report(HERS)).episodes == {}
    await journal.close()


@pytest.mark.parametrize("where", ["delete", "find", "_delete", "clear", "log_emptied", "_check_room"])
async def test_what_was_cut_short_is_done_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    caplog.set_level(logging.INFO, "swarm")
    path = tmp_path / "journal.db"
    journal, hers = await filled(path, 8, 40)

    def dies(*arguments: Any) -> None:
        raise sqlite3.OperationalError("killed")

    with monkeypatch.context() as patched:
        target = "swarm.server.journal.journal" if where in ("delete", "clear") else "swarm.server.journal.erasure"
        patched.setattr(f"{target}.{where}", dies)
        with pytest.raises(UnavailableError, match="killed; the deletion is noted"):
            await journal.erase(stone())
    await journal.close()
    journal = Journal.open(path)
    assert "is written anew without what was deleted" in caplog.text
    assert [name for name in hers if traces(tmp_path, name)] == []
    await journal.close()


@pytest.mark.parametrize("error", [UnavailableError("no room"), OSError("no room"), sqlite3.OperationalError("full")])
async def test_what_cannot_be_cleared_keeps_no_server_from_starting_and_is_cleared_when_it_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("swarm.server.journal.writer.IDLE_SECONDS", 0.01)
    monkeypatch.setattr("swarm.server.journal.writer.AGE_SECONDS", 0.01)
    path = tmp_path / "journal.db"
    journal, hers = await filled(path, 9, 40)
    await journal.close()
    erasure.bury(tmp_path, stone())

    def full(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(erasure, "_check_room", full)
        journal = Journal.open(path)
        assert not {one.episode_uuid for _, one in journal.recover().finished}.intersection(hers)
        done: Any = []
        with pytest.raises(UnavailableError, match=r"no room|full"):
            await journal.erase(stone().model_copy(update={"id": "another"}))
    async with asyncio.timeout(20):
        while not done:
            # idle is who is left alone
            await asyncio.sleep(0.1)
            with closing(sqlite3.connect(path)) as connection:
                done = len(connection.execute("SELECT tombstone FROM erasures").fetchall()) == 2
    assert [name for name in hers if traces(tmp_path, name)] == []
    await journal.close()


async def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = await filled(tmp_path / "journal.db", 5, 40)
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    with pytest.raises(UnavailableError, match=r"the rows are deleted, but .* lacks \d+ MB"):
        await journal.erase(stone())
    assert (await journal.report(HERS)).episodes == {}
    await journal.close()


async def test_without_a_tombstone_nothing_is_deleted(tmp_path: Path) -> None:
    journal, hers = await filled(tmp_path / "journal.db", 5, 20)
    (tmp_path / erasure.TOMBSTONES).mkdir()
    with pytest.raises(UnavailableError, match="without it nothing is deleted"):
        await journal.erase(stone())
    (tmp_path / erasure.TOMBSTONES).rmdir()
    assert (await journal.report(HERS)).episodes == {"waiting": len(hers)}
    await journal.close()


async def test_a_server_that_cannot_finish_a_deletion_says_why_it_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.db"
    journal, hers = await filled(path, 5, 20)
    await journal.close()
    erasure.bury(tmp_path, stone())

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"cannot write .*tombstones\.jsonl: No space"):
            Journal.open(path)
    journal = Journal.open(path)
    assert hers and (await journal.report(HERS)).episodes == {}
    await journal.close()


async def test_a_deletion_that_the_writer_does_not_get_to_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = await filled(tmp_path / "journal.db", 5, 20)
    monkeypatch.setattr("swarm.server.journal.journal.ERASE_SECONDS", 0.01)
    monkeypatch.setattr("swarm.server.journal.writer.Writer.put", lambda *_: None)
    with pytest.raises(UnavailableError, match="the deletion is noted"):
        await journal.erase(stone())
    assert [one.subject for one in erasure.tombstones(tmp_path)] == [HERS]
    await journal.close()


async def test_a_tombstone_that_a_kill_cut_off_is_written_over(tmp_path: Path) -> None:
    (tmp_path / erasure.TOMBSTONES).write_text('{"id": "ha')
    assert erasure.tombstones(tmp_path) == []
    erasure.bury(tmp_path, stone())
    erasure.bury(tmp_path, stone(Subject(user="u")))
    assert [one.subject.user for one in erasure.tombstones(tmp_path)] == ["", "u"]


@pytest.mark.parametrize("session", ["\u00c5sa".encode().decode("latin-1"), "a\u2028b", "a\rb"])
async def test_a_tombstone_is_read_whatever_the_name_has(tmp_path: Path, session: str) -> None:
    erasure.bury(tmp_path, stone(Subject(session=session)))
    assert [one.subject.session for one in erasure.tombstones(tmp_path)] == [session]


async def test_a_batch_that_is_out_is_sent_again_without_what_was_deleted(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal.open(path)
    journal.append(RunRow("r", ""), *episode("hers-1", 3), *episode("his-1", 3), *episode("his-2", 3))
    journal.append(*taken(batch("b", one=["hers-1"], two=["his-1", "his-2"])))
    await journal.synced()
    await journal.erase(stone())
    out = journal.recover().outstanding
    assert out is not None and [group.task_id for group in out.batch.groups] == ["two"]
    await journal.close()


async def test_a_report_names_the_versions_that_learned_from_it_after_it_is_deleted(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    journal.append(RunRow("r", ""))
    for number, name in enumerate(["his-1", "hers-1", "his-2"], 1):
        made = batch(f"b{number}", t=[name])
        journal.append(*episode(name, 3), *taken(made), *stepped(made, number))
    await journal.synced()
    before = await journal.report(HERS)
    assert before.episodes == {"trained": 1}
    await journal.erase(stone())
    after = await journal.report(HERS)
    for report in (before, after):
        assert [(version.step, version.current) for version in report.versions] == [(2, True), (3, True)]
        assert report.clean_step == 1
    assert after.episodes == {} and [one.episodes for one in after.earlier] == [1]
    await journal.close()
