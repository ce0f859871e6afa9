import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.root import app
from swarm.errors import ConfigError
from swarm.server.journal.journal import Journal
from tests.swarm.server.journal.build import claimed, ended


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    async def fill() -> None:
        journal = Journal.open(tmp_path / "journal.db")
        journal.append(claimed("a"), ended("a"))
        await journal.close()

    asyncio.run(fill())
    return tmp_path


def test_export_says_what_it_wrote(run_dir: Path) -> None:
    out = run_dir / "x.jsonl"
    command = ["swarm", "export", "--run-dir", str(run_dir), "--out", str(out), "--state", "waiting"]
    shown = CliRunner().invoke(app, command, catch_exceptions=False)
    assert shown.exit_code == 0
    assert "x.jsonl: 1 episodes, 1 timelines, 3 response tokens" in shown.output
    as_json = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    assert json.loads(as_json.stdout) == {
        "path": str(out),
        "rows": 1,
        "timelines": 1,
        "tokens": 3,
        "bytes": out.stat().st_size,
        "groups": None,
        "left_out": None,
    }


def test_trained_episodes_are_the_default(run_dir: Path) -> None:
    out = run_dir / "x.parquet"
    done = CliRunner().invoke(app, ["swarm", "export", "--run-dir", str(run_dir), "-o", str(out), "--json"])
    assert json.loads(done.stdout)["rows"] == 0


def test_a_tokenizer_without_groups_is_a_mistake(run_dir: Path) -> None:
    command = ["swarm", "export", "--run-dir", str(run_dir), "-o", str(run_dir / "x.jsonl"), "--tokenizer", "tiny"]
    with pytest.raises(ConfigError, match="goes with --groups"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_an_unknown_run_is_named(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no run nope"):
        CliRunner().invoke(
            app,
            ["swarm", "export", "--run-dir", str(run_dir), "--out", str(run_dir / "x.jsonl"), "--run", "nope"],
            catch_exceptions=False,
        )
