from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from swarm.server.config import RouteRetention, ServerConfig
from swarm.server.journal.journal import Journal
from swarm.server.journal.recovery import recover
from swarm.server.journal.rows import CountsRow, EvaluationRow, PairRow, RatingRow, RunRow
from swarm.server.journal.schema import open_to_write
from swarm.server.journal.sqlite import write
from swarm.server.journal.writer import Retention
from swarm.types import Notes, WorkflowOutput
from tests.swarm.server.journal.build import batch, call, claimed, dropped, ended, over, taken

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.server.journal.writer.IDLE_SECONDS", 0.01)
    # a log that a test reads just then is emptied at the next look
    monkeypatch.setattr("swarm.server.journal.writer.AGE_SECONDS", 0.05)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


def waste(journal: Journal, first: int, last: int, tokens: int = 3) -> None:
    """Append episodes that end and are dropped."""
    names = [f"e{number}" for number in range(first, last)]
    journal.append(*map(claimed, names), *(call(name, name, tokens) for name in names))
    journal.append(*(ended(name, tokens=tokens) for name in names), dropped(*names))


async def test_the_latest_of_those_that_are_over_are_kept(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db", ServerConfig(keep_episodes=50))
    journal.append(RunRow("r", ""), claimed("running"), claimed("waiting"), ended("waiting"))
    journal.append(claimed("out"), ended("out"), *taken(batch("b", t=["out"])), CountsRow("r", 0, 1000, 0))
    for first in range(0, 1000, 100):
        waste(journal, first, first + 100)
        await journal.synced()
    await until(lambda: len(journal.recover().endings) == 52)
    found = journal.recover()
    assert set(found.endings) == {"waiting", "out", *(f"e{n}" for n in range(950, 1000))}
    assert [one.claim.episode_uuid for one in found.claimed] == ["running"]
    assert [one.episode_uuid for _, one in found.finished] == ["waiting"]
    assert found.outstanding is not None
    assert found.dropped == 1000, "what is forgotten stays counted"
    assert await journal.past_ending("e3") is None
    await journal.close()


async def test_under_load_few_more_than_wanted_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.server.journal.writer.IDLE_SECONDS", 600.0)
    journal = Journal.open(tmp_path / "journal.db", ServerConfig(keep_episodes=50))
    highest = 0
    for first in range(0, 400, 20):
        waste(journal, first, first + 20)
        await journal.synced()
        highest = max(highest, len(journal.recover().endings))
    assert 100 < highest < 50 + 128 + 20, "they go by the hundred, for each look at them costs a commit time"
    await journal.close()


async def test_the_size_is_bounded_under_load_and_shrinks_after(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    limit = 2 * 1024 * 1024
    journal = Journal.open(path, ServerConfig(keep_bytes=limit))
    for first in range(0, 1000, 50):
        waste(journal, first, first + 50, tokens=400)  # 20 times a quarter of a megabyte
        await journal.synced()
        assert path.stat().st_size < 3 * limit
    await journal.close()
    journal = Journal.open(path, ServerConfig(keep_bytes=limit // 4))
    journal.append(claimed("wake"))
    await journal.synced()
    slack = 512 * 4096
    await until(lambda: path.stat().st_size < limit // 4 + 2 * slack)
    assert "e999" in journal.recover().endings
    await journal.close()


async def test_what_is_too_old_goes_and_is_written_over(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db", ServerConfig(keep_seconds=3600.0))
    names = [f"episode-{number}." for number in range(300)]
    journal.append(RunRow("r", ""), *map(claimed, names))
    for name in names:
        # ended long ago, or just now
        at = time.time() if name.endswith("7.") else 1.6e9
        output = WorkflowOutput(reward=1.0, metadata={"text": f"text of {name}" + "w" * 500})
        journal.append(over(name, at=at, output=output))
        await journal.synced()
    young = {name for name in names if name.endswith("7.")}
    await until(lambda: set(journal.recover().endings) == young)

    def left() -> set[str]:
        content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        return {name for name in names if f"text of {name}".encode() in content}

    await until(lambda: left() == young)
    await journal.close()


def test_the_first_evaluation_stays_however_many_episodes_the_later_ones_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.server.journal.writer._KEEP_STEPS", 10)
    with closing(open_to_write(tmp_path / "journal.db")) as connection:
        connection.execute("BEGIN IMMEDIATE")
        write(connection, [RunRow("r", ""), EvaluationRow("r", 0, {"reward_mean": (1, 0.5)})])
        for episodes in range(1, 30):
            write(connection, [EvaluationRow("r", 8, {"reward_mean": (episodes, 0.5)})])
        connection.execute("COMMIT")
        Retention(connection, ServerConfig(keep_episodes=100)).tidy()
        assert [(row.step, row.sums["reward_mean"][0]) for row in recover(connection).evaluations] == [(0, 1), (8, 29)]


def test_evidence_does_not_take_the_room_of_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.server.journal.writer._KEEP_EVIDENCE", 10)
    with closing(open_to_write(tmp_path / "journal.db")) as connection:
        write(connection, [RunRow("r", "")])
        for number in range(30):
            write(connection, [PairRow("r", f"{number}", "terms", "{}"), RatingRow("r", f"{number}", "terms", "{}")])
        Retention(connection, ServerConfig(keep_episodes=100)).tidy()
        for column, table in (("group_id", "pairs"), ("answer", "ratings")):
            left = connection.execute(f"SELECT {column} FROM {table} ORDER BY rowid").fetchall()
            assert left == [(f"{number}",) for number in range(20, 30)], "the latest are kept"


async def test_evidence_is_bounded_at_a_server_that_is_never_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.server.journal.writer.IDLE_SECONDS", 600.0)
    monkeypatch.setattr("swarm.server.journal.writer._KEEP_EVIDENCE", 50)
    journal, highest = Journal.open(tmp_path / "journal.db"), 0
    for first in range(0, 1000, 20):
        numbers = range(first, first + 20)
        journal.append(*(PairRow("r", f"{number}", "terms", "{}") for number in numbers))
        journal.append(*(RatingRow("r", f"{number}", "terms", "{}") for number in numbers))
        await journal.synced()
        with closing(sqlite3.connect(tmp_path / "journal.db")) as connection:
            for table in ("pairs", "ratings"):
                highest = max(highest, *connection.execute(f"SELECT count(*) FROM {table}").fetchone())
    assert 50 < highest < 50 + 128, "the oldest go by the hundred"
    await journal.close()


def test_a_step_of_tidying_is_small_however_many_pairs_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.server.journal.writer._KEEP_RUNS", 1)
    with closing(open_to_write(tmp_path / "journal.db")) as connection:

        def pairs(run_id: str, count: int) -> None:
            write(connection, [RunRow(run_id, "")])
            write(connection, [PairRow(run_id, f"{run_id}-{number}", "terms", "{}") for number in range(count)])
            write(connection, [RatingRow(run_id, f"{run_id}-{number}", "terms", "{}") for number in range(count)])

        def instructions() -> int:
            done = 0

            def count() -> None:
                nonlocal done
                done += 1

            connection.set_progress_handler(count, 1)
            Retention(connection, ServerConfig(keep_episodes=100)).tidy()
            connection.set_progress_handler(None, 1)
            return done

        pairs("earlier", 10)
        few = instructions()
        pairs("earlier", 1000)
        assert instructions() < few + 100, "what is written waits for it"
        pairs("latest", 10)
        instructions()
        for table in ("pairs", "ratings"):
            assert connection.execute(f"SELECT run_id, count(*) FROM {table}").fetchall() == [("latest", 10)]


@pytest.mark.parametrize("of_route", [False, True])
async def test_what_a_clock_that_was_ahead_dates_holds_nothing_back(tmp_path: Path, of_route: bool) -> None:
    limits = {"keep_routes": {"chat": RouteRetention(keep_seconds=3600.0)}} if of_route else {"keep_seconds": 3600.0}
    journal = Journal.open(tmp_path / "journal.db", ServerConfig(**limits))  # type: ignore[arg-type]
    output = WorkflowOutput(reward=1.0, notes=Notes(route="chat"))
    ahead = [(f"ahead-{number}", time.time() + 1e6) for number in range(600)]
    ends = [*ahead, ("old", 1.6e9), ("ahead again", time.time() + 1e6), ("young", time.time())]
    journal.append(RunRow("r", ""), *(claimed(name) for name, _ in ends))
    journal.append(*(over(name, at=at, output=output) for name, at in ends))
    await until(lambda: set(journal.recover().endings) == {"ahead again", "young"})
    await journal.close()


async def test_a_route_keeps_less_than_others(tmp_path: Path) -> None:
    def said(name: str) -> WorkflowOutput:
        text = {"text": f"text of {name}" + "w" * 500}
        return WorkflowOutput(reward=1.0, notes=Notes(route=name.partition("-")[0]), metadata=text)

    routes = {"old": RouteRetention(keep_seconds=3600.0), "large": RouteRetention(keep_bytes=20_000)}
    journal = Journal.open(tmp_path / "journal.db", ServerConfig(keep_routes=routes))
    names = [f"{route}-{number:03}." for number in range(100) for route in ("old", "large", "other")]
    journal.append(RunRow("r", ""), *map(claimed, names))
    for name in names:
        at = time.time() if name.endswith("7.") else 1.6e9
        journal.append(over(name, at=at, output=said(name)))
    # what waits for training stays, and counts
    waiting = [f"{route}-waiting." for route in ("old", "large")]
    for name in waiting:
        journal.append(claimed(name), call(name, name, 900))
        journal.append(ended(name, tokens=900, output=said(name)))
    await journal.synced()

    def left(route: str) -> list[str]:
        content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        return [name for name in names if name.startswith(route) and f"text of {name}".encode() in content]

    young = [name for name in names if name.startswith("old") and name.endswith("7.")]
    await until(lambda: left("old") == young)
    await until(lambda: len(left("large")) < 25)
    kept = [name for name in names if name.startswith("large") and name in journal.recover().endings]
    size = sum(len(said(name).model_dump_json()) for name in kept)
    tokens = 900 * 9
    assert kept == [name for name in names if name.startswith("large")][-len(kept) :], "the oldest go"
    assert 15_000 < size + tokens < 22_000
    assert len(left("other")) == 100 and len(journal.recover().finished) == 2
    await journal.close()


async def test_the_log_is_emptied_once_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.server.journal.writer.AGE_SECONDS", 0.01)
    path = tmp_path / "journal.db"
    log = path.with_name("journal.db-wal")
    journal = Journal.open(path)
    journal.append(RunRow("r", ""))
    await journal.synced()
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM runs").fetchone()
        waste(journal, 0, 10)
        await journal.synced()
        for _ in range(3):
            await journal.past_ending("none")
        assert log.stat().st_size
    await until(lambda: not log.stat().st_size)
    await journal.close()


async def test_a_file_that_cannot_be_tidied_takes_rows_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def fails(_: Retention) -> bool:
        tries.append(1)
        raise OSError("no such file")

    monkeypatch.setattr(Retention, "tidy", fails)
    journal = Journal.open(tmp_path / "journal.db")
    await until(lambda: bool(tries))
    journal.append(RunRow("r", ""))
    await journal.synced()
    assert journal.recover().run_id == "r"
    await journal.close()
