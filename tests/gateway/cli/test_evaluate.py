"""``policies eval``, with scripted models: each version answers with its own name."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.root import app
from gateway.launch import plan
from swarm.job import TrainJob
from tests.gateway.cli.test_models import journal, saved, steps
from tests.gateway.launch.test_up import COMMAND
from tests.processes import nothing_left_behind

pytestmark = pytest.mark.slow

HOOK = """
def on_compute_relative_reward(task, candidates, context):
    return [{"step 2": 1.0, "step 1": 0.25}.get(candidate.text, 0.0) for candidate in candidates]
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    journal(folder, TrainJob(model="tiny"), *steps("r", 1, 2))
    saved(folder, _1=0.1, _2=0.9)
    (folder / "serves").touch()
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "on_compute_relative_reward.py").write_text(HOOK)
    (tmp_path / "held_out.jsonl").write_text("".join(f'{{"question": "q{number}"}}\n' for number in range(8)))
    monkeypatch.setattr(plan, "COMMAND", (*COMMAND, "tests.gateway.scripted_up", "steps"))
    return folder


def evaluate(run_dir: Path, *arguments: str) -> Result:
    files = ["--data", str(run_dir.parent / "held_out.jsonl"), "--hooks", str(run_dir.parent / "hook")]
    with nothing_left_behind():
        result = CliRunner().invoke(app, ["policies", "eval", *arguments, *files, "--run-dir", str(run_dir)])
    assert not list(run_dir.glob(".eval-*"))
    return result


@pytest.mark.parametrize(
    ("arguments", "difference", "verdict"),
    [
        (["2"], 1.0, "better by 1.000 [1.000, 1.000] on 8 prompts"),
        (["2", "--against", "1", "--answers", "3"], 0.75, "better by 0.750 [0.750, 0.750] on 8 prompts"),
        (
            ["1", "--against", "2", "--vllm=--gpu-memory-utilization=0.3"],
            -0.75,
            "worse by 0.750 [0.750, 0.750] on 8 prompts",
        ),
    ],
)
def test_a_version_is_compared_with_an_earlier_one(
    run_dir: Path, arguments: list[str], difference: float, verdict: str
) -> None:
    result = evaluate(run_dir, *arguments, "--json", "--report", str(run_dir.parent / "report"))
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads(result.stdout)
    assert report == json.loads((run_dir.parent / "report" / "report.json").read_text())
    comparison = report["comparison"]
    assert comparison["difference"] == pytest.approx(difference) and comparison["verdict"] == verdict
    assert report["label"] == f"step {arguments[0]}" and comparison["earlier"] != report["label"]
    # the model that the run began with needs no export
    assert len((run_dir / "exports").read_text().split()) == 1 + ("--against" in arguments)
    served = [json.loads(line) for line in (run_dir / "models").read_text().splitlines()]
    assert [flags["--name"] for flags in served] == [comparison["earlier"], report["label"]]
    shown = CliRunner().invoke(app, ["policies", "show", arguments[0], "--run-dir", str(run_dir)]).stdout
    assert f"held out: against {comparison['earlier']} on held_out.jsonl, judged by hook (" in shown
    assert f": {verdict}\n" in shown
    assert {flags.get("--gpu-memory-utilization") for flags in served} == {"0.3" if "--vllm" in arguments[-1] else None}


def test_what_cannot_be_compared_says_why(run_dir: Path) -> None:
    assert "kept are 1, 2" in str(evaluate(run_dir, "3").exception)
    assert "compared with itself" in str(evaluate(run_dir, "2", "--against", "2").exception)
    held_out = run_dir.parent / "held_out.jsonl"
    held_out.rename(aside := run_dir.parent / "aside.jsonl")
    assert "held_out.jsonl" in str(evaluate(run_dir, "2").exception)
    aside.rename(held_out)
    assert not (run_dir / "models").exists(), "before anything is started"
    (run_dir / "no-export").touch()
    refused = str(evaluate(run_dir, "2", "--against", "1").exception)
    assert "the export of step 2 ended with exit code 1" in refused and "step 2 is not kept" in refused
    (run_dir / "no-export").unlink()
    (run_dir / "no-memory").touch()
    refused = str(evaluate(run_dir, "2").exception)
    assert (
        "Engine core initialization failed" in refused
        and (log := run_dir / "logs" / "eval-vLLM-of-the-model-before.log").exists()
    )
    assert str(log) in refused


def test_what_was_not_answered_or_judged_is_told_and_no_verdict_of_it_is_kept(run_dir: Path) -> None:
    data, hook = run_dir.parent / "held_out.jsonl", run_dir.parent / "hook" / "on_compute_relative_reward.py"
    rows = data.read_text()
    data.write_text(rows + '{"question": "TOO LONG"}\n')
    result = evaluate(run_dir, "2")
    assert result.exit_code == 0 and "on 8 prompts" in result.stdout
    for name in ("the model before", "step 2"):
        assert f"{name}: 1 of 9 requests failed" in result.stderr and "the prompt is too long" in result.stderr
    (run_dir / "held_out.jsonl").unlink()
    hook.write_text("def on_compute_relative_reward(task, candidates, context):\n    raise ValueError('no judge')\n")
    report = run_dir.parent / "report"
    result = evaluate(run_dir, "2", "--report", str(report))
    assert "judges no prompt" in str(result.exception) and "no judge" in str(result.exception)
    for name in ("the-model-before", "step-2"):
        assert len(json.loads((report / name / "report.json").read_text())["scores"]) == 8, "the answers are lost"
    data.write_text('{"question": "TOO LONG"}\n')
    result = evaluate(run_dir, "2")
    assert "the model before did not answer" in str(result.exception) and "too long" in str(result.exception)
    assert not (run_dir / "held_out.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_no_process_and_no_folder(run_dir: Path, number: signal.Signals) -> None:
    (run_dir / "serves").unlink()
    left = run_dir / ".eval-4194305-killed"
    left.mkdir()
    files = ["--data", str(run_dir.parent / "held_out.jsonl"), "--hooks", str(run_dir.parent / "hook")]
    # SIGINT is ignored by what a shell starts in the background
    start = "import signal, gateway.cli, gateway.launch.plan as plan; signal.signal(2, signal.default_int_handler); "
    start += f"plan.COMMAND = {plan.COMMAND!r}; gateway.cli.main()"
    command = [sys.executable, "-c", start, "policies", "eval", "2", *files, "--run-dir", str(run_dir)]
    # a model that is not yet held when the signal comes ends by itself, as its stdin does
    with nothing_left_behind(30.0), subprocess.Popen(command) as evaluating:
        try:
            deadline = time.monotonic() + 60.0
            while not (run_dir / "models").exists():
                assert evaluating.poll() is None and time.monotonic() < deadline, "no model is started"
                time.sleep(0.02)
            assert len(list(run_dir.glob(".eval-*"))) == 2 and not left.exists()
            evaluating.send_signal(number)
            assert evaluating.wait(60.0) == 128 + number
        finally:
            evaluating.kill()
    assert not list(run_dir.glob(".eval-*"))
