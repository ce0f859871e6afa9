import asyncio
import json
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.root import app
from swarm.errors import ConfigError
from swarm.server.journal.journal import Journal
from swarm.types import OnProgress
from tests.swarm.server.journal.build import claimed, ended


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    async def fill() -> None:
        journal = Journal.open(tmp_path / "journal.db")
        journal.append(claimed("a"), ended("a"))
        await journal.close()

    asyncio.run(fill())
    return tmp_path


def export(run_dir: Path, *arguments: str, out: str = "x.jsonl") -> str:
    command = ["swarm", "export", "--run-dir", str(run_dir), "--out", str(run_dir / out), *arguments]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_export_says_what_it_wrote(run_dir: Path) -> None:
    shown = export(run_dir, "--state", "waiting")
    assert "x.jsonl: 1 episodes, 1 timelines, 3 response tokens" in shown
    out = run_dir / "x.jsonl"
    assert json.loads(export(run_dir, "--state", "waiting", "--json")) == {
        "path": str(out),
        "rows": 1,
        "timelines": 1,
        "tokens": 3,
        "bytes": out.stat().st_size,
        "groups": None,
        "left_out": None,
    }
    assert json.loads(export(run_dir, "--json", out="x.parquet"))["rows"] == 0, "trained episodes are the default"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tokenizer", "tiny", "goes with --groups"),
        ("--run", "nope", "no run nope"),
        ("--run-dir", "nowhere", "there is no journal nowhere/journal.db"),
    ],
)
def test_mistakes_are_named(run_dir: Path, option: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export(run_dir, option, value)
    if option != "--tokenizer":
        with pytest.raises(ConfigError, match=message):
            export(run_dir, option, value, "--groups", out="x.jsonl")
    assert not (run_dir / "exports.jsonl").exists(), "nothing was written"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_of_what_people_wrote(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    seen: list[list[Path]] = []

    @contextmanager
    def ends(visible: bool = True) -> Generator[OnProgress]:
        def progress(stage: str, done: int, total: int | None, unit: str) -> None:
            seen.append(list(run_dir.glob(".x.jsonl.*")))
            signal.raise_signal(number)

        yield progress

    monkeypatch.setattr("gateway.cli.swarm_export.stage_bars", ends)
    before = signal.signal(number, lambda *_: None)
    try:
        command = ["swarm", "export", "--run-dir", str(run_dir), "--out", str(run_dir / "x.jsonl"), "--state", "all"]
        done = CliRunner().invoke(app, command)
    finally:
        signal.signal(number, before)
    assert done.exit_code == 128 + number and len(seen) == len(seen[0]) == 1
    assert not list(run_dir.glob("*x.jsonl*"))
