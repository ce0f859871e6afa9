"""``data``: what is printed, and who may read what it writes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.root import app
from swarm.client.sync import SwarmClient
from swarm.subjects import DataReport, LearnedVersion, Subject

SERVER = ["--swarm-url", "http://127.0.0.1:9"]


def test_an_export_is_for_its_owner_alone_also_where_the_file_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(_: SwarmClient, subject: Subject) -> bytes:
        return b'{"key": "%s"}\n' % subject.key.encode()

    monkeypatch.setattr(SwarmClient, "data_export", rows)
    out = tmp_path / "hers.jsonl"
    out.write_text("older and longer than what is written now\n")
    out.chmod(0o644)
    done = CliRunner().invoke(app, ["data", "export", "--key", "hers", "--out", str(out), *SERVER])
    assert done.exit_code == 0, done.output
    assert (stat.S_IMODE(out.stat().st_mode), out.read_text()) == (0o600, '{"key": "hers"}\n')
    link = tmp_path / "stdout"
    link.symlink_to(out)
    done = CliRunner().invoke(app, ["data", "export", "--key", "his", "--out", str(link), *SERVER])
    assert done.exit_code == 0 and link.is_symlink() and out.read_text() == '{"key": "his"}\n', "as /dev/stdout is one"


def test_a_report_says_what_it_cannot_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwarmClient, "data_report", lambda *_: DataReport())
    done = CliRunner().invoke(app, ["data", "report", "--key", "hers", *SERVER])
    assert "keep_seconds" in done.output and "no policy version was trained on the rest" in done.output


def test_a_report_says_how_to_train_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = [LearnedVersion(run_id="r", step=8, current=True)]
    monkeypatch.setattr(SwarmClient, "data_report", lambda *_: DataReport(versions=learned, clean_step=7))
    done = CliRunner().invoke(app, ["data", "report", "--key", "hers", *SERVER])
    assert done.output.splitlines()[-1].endswith("swarm-gateway policies fork 7 --out FOLDER")
