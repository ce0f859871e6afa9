import io
import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.output import amount, confirm_deletion, print_json, stage_bars, tell
from gateway.cli.root import app
from swarm.client import SwarmClient
from swarm.control_protocol import ResolvedJob
from swarm.job import TrainJob


@pytest.mark.parametrize(
    ("values", "text"),
    [((12_000_000, 93_000_000, "B"), "12/93 MB"), ((3, 272, "tensors"), "3/272 tensors"), ((0, None, "B"), "")],
)
def test_amounts_in_the_unit_people_read(values: tuple[int, int | None, str], text: str) -> None:
    assert amount(*values) == text


def test_a_pipe_gets_a_line_per_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with stage_bars() as on_progress:
        on_progress("downloading", 0, None, "B")
        on_progress("downloading", 5, 10, "B")
        on_progress("converting", 1, 1, "tensors")
    err = capsys.readouterr().err
    assert err.count("downloading ...") == err.count("converting ...") == 1


def test_json_output_stays_clean(capsys: pytest.CaptureFixture[str]) -> None:
    with stage_bars(visible=False) as on_progress:
        on_progress("downloading", 5, 10, "B")
    assert capsys.readouterr() == ("", "")


def test_what_a_server_says_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tell(False, {}, "a snapshot: \x1b[2J new\nand more", "  é")
    assert capsys.readouterr().out == "a snapshot: \N{REPLACEMENT CHARACTER}[2J new\N{RETURN SYMBOL}and more\n  é\n"


def test_half_a_character_of_a_model_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": "é \ud83d"})
    out = capsys.readouterr().out
    assert "é" in out and json.loads(out) == {"text": "é \ud83d"}


@pytest.mark.parametrize("encoding", ["ascii", "iso8859-1"])
def test_json_is_whole_where_the_terminal_is_not_of_unicode(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding))
    print_json({"text": "é €"})
    assert json.loads(written.getvalue().decode(encoding)) == {"text": "é €"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_who_is_asked_is_asked_on_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # stdout may be a file of JSON
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    confirm_deletion(lambda: ["kept: 2 trained"])
    out, err = capsys.readouterr()
    assert (out.strip(), err) == ("", "kept: 2 trained\nDelete it for good? [y/N]:")


def test_an_infinity_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"job": {"overrides": {"a.most": math.inf, "a.least": -math.inf}}, "text": "Infinity"})
    out = capsys.readouterr().out
    assert out == '{"job": {"overrides": {"a.most": "Infinity", "a.least": "-Infinity"}}, "text": "Infinity"}\n'


def test_a_job_is_shown_without_a_server_and_each_override_with_its_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = "{+a.b: 1, +a.day: 2026-11-29, a.most: .inf, trainer: {save_freq: 3, nnodes: 1}}"
    Path("job.yaml").write_text(f"model: tiny\noverrides: {overrides}\n")
    told = ["config", "show", "job.yaml", "--set", "++trainer.nnodes=2"]
    lines = CliRunner().invoke(app, told, catch_exceptions=False).stdout.splitlines()
    shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert shown["a.b"] == "1  [job]" and shown["trainer.nnodes"] == "2  [set]"
    assert shown["a.day"] == "2026-11-29  [job]"
    assert shown["trainer.save_freq"] == "3  [job]" and shown["model"] == "tiny  [job]"
    assert shown["a.most"] == "Infinity  [job]"
    plain = json.loads(CliRunner().invoke(app, [*told, "--json"], catch_exceptions=False).stdout)
    assert plain["job"]["overrides"]["a.most"] == "Infinity"


def test_a_file_that_is_named_is_written_with_json_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, out = tmp_path / "job.yaml", tmp_path / "verl.yaml"
    job.write_text("model: tiny\n")
    resolved = ResolvedJob(
        job=TrainJob(model="tiny"), job_sources={}, config={"actor": {"lr": 1}}, sources={"actor.lr": "set"}
    )

    def resolve(client: SwarmClient, job: str, **fields: object) -> ResolvedJob:
        return resolved

    monkeypatch.setattr(SwarmClient, "resolve_config", resolve)
    told = ["config", "dump", str(job), "--swarm-url", "http://127.0.0.1:9", "--out", str(out), "--json"]
    done = CliRunner().invoke(app, told, catch_exceptions=False)
    assert json.loads(done.stdout) == {"path": str(out), "values": 1}
    assert out.read_text() == "actor:\n  lr: 1\n"


def test_an_infinity_is_shown_also_where_a_server_tells_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: tiny\n")
    clip = "actor_rollout_ref.actor.grad_clip"
    resolved = ResolvedJob(
        job=TrainJob(model="tiny", overrides={clip: math.inf}),
        job_sources={"overrides": "job"},
        config={"grad_clip": math.inf},
        sources={"grad_clip": "job"},
    )
    received = ResolvedJob.model_validate_json(resolved.model_dump_json())

    def resolve(client: SwarmClient, job: str, **fields: object) -> ResolvedJob:
        return received

    monkeypatch.setattr(SwarmClient, "resolve_config", resolve)
    told = ["config", "show", str(tmp_path / "job.yaml"), "--swarm-url", "http://127.0.0.1:9"]
    shown = CliRunner().invoke(app, told, catch_exceptions=False).stdout.splitlines()
    assert shown == [f'overrides  {{"{clip}": Infinity}}  [job]', "grad_clip  Infinity  [job]"]
    plain = json.loads(CliRunner().invoke(app, [*told, "--json"], catch_exceptions=False).stdout)
    assert (plain["job"]["overrides"], plain["config"]) == ({clip: "Infinity"}, {"grad_clip": "Infinity"})
