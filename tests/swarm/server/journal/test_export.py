from __future__ import annotations

import asyncio
import json
import sqlite3
import stat
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from msgspec.structs import asdict, replace

from swarm.errors import ConfigError, UnavailableError
from swarm.server.journal.erasure import EXPORTS
from swarm.server.journal.export import ExportState, export
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import QuarantineRow, RunRow
from swarm.subjects import Subject
from swarm.tokens import Timeline, TokenCounts, Trajectory, as_lists
from swarm.types import Notes, WorkflowOutput
from tests.swarm.server.journal.build import batch, claimed, dropped, ended, over, refused, stepped, taken, trajectory
from tests.swarm.server.journal.test_erasure import HERS, filled, stone


@pytest.fixture
def path(tmp_path: Path) -> Generator[Path]:
    """The journal of a server that runs, with one episode of each fate."""
    path = tmp_path / "journal.db"

    async def fill() -> Journal:
        journal = Journal.open(path)
        names = ["trained", "waiting", "stale", "refused", "out", "gone", "running"]
        journal.append(RunRow("r0", ""), claimed("old", run_id="r0"), ended("old"), dropped("old", reason="older"))
        journal.append(RunRow("r1", ""), *(claimed(name, group_uuid="g", run_id="r1") for name in names))
        journal.append(claimed("test", episode_type="eval", run_id="r1"), over("test", "ended", 2.0))
        journal.append(ended("trained"), *taken(batch("b1", t=["trained"])), *stepped(batch("b1", t=["trained"]), 7))
        journal.append(*(ended(name) for name in ("waiting", "stale", "out")), *taken(batch("b2", t=["out"])))
        journal.append(dropped("stale", reason="too old"), over("gone", "idle", 3.0))
        journal.append(QuarantineRow("refused", "token truth"), refused("refused", "quarantined: token truth"))
        await journal.synced()
        return journal

    with asyncio.Runner() as runner:
        journal = runner.run(fill())
        yield path
        runner.run(journal.close())


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ("trained", ["trained"]),
        ("waiting", ["waiting", "out"]),
        ("dropped", ["old", "stale", "refused"]),
        ("all", ["old", "trained", "waiting", "stale", "refused", "out", "gone", "test"]),
    ],
)
def test_each_state_has_its_episodes(path: Path, tmp_path: Path, state: ExportState, names: list[str]) -> None:
    report = export(path, tmp_path / "x.jsonl", state)
    assert [row["episode_uuid"] for row in lines(tmp_path / "x.jsonl")] == names
    assert report.rows == len(names)
    assert report.bytes == (tmp_path / "x.jsonl").stat().st_size


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_only_the_owner_may_read_what_people_wrote(path: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    out.write_text("an earlier one, for all to read")
    out.chmod(0o644)
    assert export(path, out).rows == 1
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_a_row_says_all_of_an_episode(path: Path, tmp_path: Path) -> None:
    export(path, tmp_path / "x.jsonl")
    (row,) = lines(tmp_path / "x.jsonl")
    given = trajectory("trained")
    assert row.pop("timelines") == [as_lists(timeline) for timeline in given.timelines]
    assert row.pop("output") == {
        "reward": 1.0,
        "credit": 0.0,
        "is_success": None,
        "metadata": {"answer": "yes"},
        "log_metrics": {},
        "notes": None,
    }
    assert row == {
        "episode_uuid": "trained",
        "run_id": "r1",
        "state": "trained",
        "episode_type": "train",
        "client_uuid": "c",
        "group_uuid": "g",
        "task_id": "t",
        "group_id": "",
        "hook": "",
        "code": "",
        "request_id": "",
        "trace_id": "",
        "reward": 1.0,
        "rank": None,
        "components": {},
        "reason": "",
        "how": "ended",
        "drop_reason": "",
        "quarantine_reason": "",
        "batch_id": "b1",
        "step": 7,
        "min_policy_version": 3,
        "max_policy_version": 4,
        "claimed_at": 1.5e9,
        "ended_at": 1.6e9,
        "tokens": asdict(TokenCounts()),
        "num_calls": 1,
        "finish_reason": "",
    }


def test_why_an_episode_was_dropped(path: Path, tmp_path: Path) -> None:
    export(path, tmp_path / "x.jsonl", "dropped")
    rows = {row["episode_uuid"]: row for row in lines(tmp_path / "x.jsonl")}
    assert {name: row["drop_reason"] for name, row in rows.items()} == {
        "old": "older",
        "stale": "too old",
        "refused": "quarantined: token truth",
    }
    assert rows["refused"]["quarantine_reason"] == "token truth"
    assert rows["stale"]["timelines"]
    assert rows["refused"]["timelines"] == []


def test_parquet_holds_what_json_holds_and_gives_the_trajectory_back(path: Path, tmp_path: Path) -> None:
    export(path, tmp_path / "x.jsonl", "all")
    export(path, tmp_path / "x.parquet", "all")
    rows = pq.read_table(tmp_path / "x.parquet").to_pylist()
    for row in rows:
        row["output"] = None if row["output"] is None else json.loads(row["output"])
        row["components"] = dict(row["components"])
    assert rows == lines(tmp_path / "x.jsonl")
    (row,) = [row for row in rows if row["state"] == "trained"]
    back = Trajectory(
        log_metrics=trajectory("trained").log_metrics,
        **{name: row[name] for name in ("episode_uuid", "task_id", "reward", "num_calls")},
        timelines=[Timeline(**timeline) for timeline in row["timelines"]],
    )
    assert back == trajectory("trained")


def test_many_episodes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.server.journal.export._PIECE_BYTES", 5_000)
    path = tmp_path / "journal.db"
    names = [f"e{number}" for number in range(150)]

    async def fill() -> None:
        journal = Journal.open(path)
        journal.append(*map(claimed, names), *(ended(name, f"task {name}") for name in reversed(names)))
        await journal.close()

    asyncio.run(fill())
    before = path.read_bytes()
    seen: list[int] = []
    report = export(path, tmp_path / "x.parquet", "waiting", progress=lambda _, done, *rest: seen.append(done))
    rows = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert [row["episode_uuid"] for row in rows] == names
    assert [row["task_id"] for row in rows] == [f"task {name}" for name in names]
    assert (report.timelines, report.tokens) == (150, 450)
    assert len(seen) > 10
    assert seen[-1] == 150
    assert path.read_bytes() == before


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def fill() -> None:
        journal = Journal.open(path)
        end = ended("a")
        assert end.output is not None
        output = end.output.model_copy(update={"log_metrics": {"x": float("nan")}})
        journal.append(claimed("a"), replace(end, output=output))
        await journal.close()

    asyncio.run(fill())
    export(path, tmp_path / "x.jsonl", "waiting")
    assert lines(tmp_path / "x.jsonl")[0]["output"]["log_metrics"] == {"x": None}


def test_what_a_client_says_of_its_reward_has_columns_of_its_own(tmp_path: Path) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    origin = {"request_id": "req_1", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    said = Notes(rank=2, reason="short \ud800", hook="mine", code="c0de", group_id="g1", **origin)
    odd = Notes(traceparent="00-x-y-z")

    async def fill() -> None:
        journal = Journal.open(tmp_path / "journal.db")
        for name, notes in (("a", said), ("b", odd), ("c", None)):
            output = WorkflowOutput(reward=1.0, metadata={"other": [1]}, notes=notes, log_metrics={"length": 0.5})
            journal.append(claimed(name), replace(ended(name), output=output))
        await journal.close()

    asyncio.run(fill())
    export(tmp_path / "journal.db", tmp_path / "x.jsonl", "waiting")
    export(tmp_path / "journal.db", tmp_path / "x.parquet", "waiting")
    told = {
        "rank": 2,
        "reason": "short ?",
        "hook": "mine",
        "code": "c0de",
        "group_id": "g1",
        "request_id": "req_1",
        "trace_id": trace,
    }
    nothing = {**dict.fromkeys(told, ""), "rank": None}
    for rows in (lines(tmp_path / "x.jsonl"), pq.read_table(tmp_path / "x.parquet").to_pylist()):
        assert [{name: row[name] for name in told} for row in rows] == [told, nothing, nothing]
        assert all(dict(row["components"]) == {"length": 0.5} for row in rows)
    assert lines(tmp_path / "x.jsonl")[0]["output"]["metadata"] == {"other": [1]}


def test_what_its_client_gave_up_for_a_reason_was_dropped(tmp_path: Path) -> None:
    async def fill() -> None:
        journal = Journal.open(tmp_path / "journal.db")
        journal.append(claimed("failed"), claimed("left"), claimed("late"))
        journal.append(over("failed", "aborted", drop_reason="no reward", notes=Notes(hook="mine", group_id="g1")))
        journal.append(over("left", "aborted"), over("late", "idle"))
        await journal.close()

    asyncio.run(fill())
    export(tmp_path / "journal.db", tmp_path / "x.jsonl", "dropped")
    [row] = lines(tmp_path / "x.jsonl")
    assert (row["episode_uuid"], row["how"], row["drop_reason"]) == ("failed", "aborted", "no reward")
    assert (row["hook"], row["group_id"], row["reward"]) == ("mine", "g1", None)
    assert export(tmp_path / "journal.db", tmp_path / "x.parquet", "all").rows == 3


@pytest.mark.parametrize(
    ("journal", "out", "run", "message"),
    [
        ("journal.db", "x.csv", None, r"must end in \.parquet or \.jsonl"),
        ("none.db", "x.jsonl", None, "there is no journal"),
        ("journal.db", "none/x.jsonl", None, "cannot write"),
        ("journal.db", "none/x.parquet", None, "cannot write"),
        ("journal.db", "x.jsonl", "r9", "no run r9; the latest runs are: r0, r1"),
        ("noise.db", "x.jsonl", None, "cannot read the journal"),
        ("empty.db", "x.jsonl", None, "is empty"),
    ],
)
def test_what_cannot_be_exported_leaves_no_file(
    path: Path, journal: str, out: str, run: str | None, message: str
) -> None:
    folder = path.parent
    (folder / "noise.db").write_bytes(b"noise" * 1000)
    (folder / "empty.db").touch()
    with pytest.raises(ConfigError, match=message):
        export(folder / journal, folder / out, "all", run)
    assert not [file.name for file in folder.iterdir() if "x." in file.name]


@pytest.mark.parametrize(("table", "column"), [("episodes", "output"), ("trajectories", "data")])
def test_a_damaged_row_is_damage_of_the_journal(path: Path, tmp_path: Path, table: str, column: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE {table} SET {column} = substr({column}, 1, 3)")
        connection.commit()
    with pytest.raises(ConfigError, match=r"cannot read the journal .*journal\.db"):
        export(path, tmp_path / "x.jsonl", "all")
    assert not (tmp_path / "x.jsonl").exists()


def test_an_export_that_cannot_be_noted_names_the_file_of_notes(path: Path, tmp_path: Path) -> None:
    (tmp_path / EXPORTS).mkdir()
    with pytest.raises(
        UnavailableError, match=r"cannot write .*exports\.jsonl: Is a directory; .* nothing is exported"
    ):
        export(path, tmp_path / "x.jsonl", "all")
    assert not (tmp_path / "x.jsonl").exists()


def test_one_run_alone_with_progress(path: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None, str]] = []
    report = export(path, tmp_path / "x.jsonl", "all", "r1", progress=lambda *one: seen.append(one))
    assert report.rows == 7
    assert seen == [("export", 7, 7, "episodes")]


@pytest.mark.anyio
async def test_an_export_that_a_clock_dates_before_what_it_holds_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = await filled(tmp_path / "journal.db", 5, 10)
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: 0.5)
        export(tmp_path / "journal.db", tmp_path / "all.jsonl", "all")
    assert (await journal.report(HERS)).exports == [str(tmp_path / "all.jsonl")]
    await journal.close()


@pytest.mark.anyio
async def test_exports_that_may_hold_it_are_named_also_after_it_is_deleted(tmp_path: Path) -> None:
    journal, _ = await filled(tmp_path / "journal.db", 5, 10)
    for name in ("all.jsonl", "again.jsonl"):
        export(tmp_path / "journal.db", tmp_path / name, "all")
    both = [str(tmp_path / "again.jsonl"), str(tmp_path / "all.jsonl")]
    assert (await journal.report(HERS)).exports == both
    assert (await journal.report(Subject(key="nobody"))).exports == []
    await journal.erase(stone())
    assert (await journal.report(HERS)).exports == both
    await journal.close()
