import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli.root import app
from gateway.cli.up import event_printer
from gateway.launch.train import TrainCommand
from gateway.reports.report import TrainingReport
from swarm.errors import ConfigError

STEP = {"step": 3, "batch_id": "b", "metrics": {"swarm/reward_mean": 0.4123}, "seconds": 9.81}


def printed(capsys: pytest.CaptureFixture[str], as_json: bool, *events: tuple[str, dict[str, object]]) -> str:
    with event_printer(as_json) as on_event:
        for kind, values in events:
            on_event(kind, values)
    return capsys.readouterr().out


def test_scripts_get_one_json_object_per_event(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, True, ("step", STEP), ("stopped", {}))
    first, second = map(json.loads, out.splitlines())
    assert first["event"] == "step"
    assert first["metrics"] == STEP["metrics"]
    assert second["event"] == "stopped"


def test_a_check_tells_scripts_of_options_that_exclude_each_other() -> None:
    done = CliRunner().invoke(app, ["up", "my.yaml", "--check", "--json", "--fresh", "--step", "2"])
    told = json.loads(done.stdout)
    assert done.exit_code == 2 and not told["ok"] and "give one of them" in told["error"]


def test_people_get_the_address_to_point_their_app_at(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(
        capsys,
        False,
        ("listening", {"name": "gateway", "url": "http://127.0.0.1:8000", "log": "/x/gateway.log"}),
        ("ready", {"model": "tiny", "seconds": 61.0}),
        ("step", STEP),
        ("warning", {"message": "steps are lost"}),
    )
    assert "WARNING: steps are lost" in out
    assert "http://127.0.0.1:8000/v1 (model tiny)" in out
    assert "step    3  reward 0.412  9.8 s" in out


@pytest.mark.parametrize(
    ("step", "whence"),
    [(4, "training continues from the checkpoint of step 4"), (0, "from the job's model: there is no checkpoint")],
)
def test_people_read_why_the_engine_died_and_where_training_goes_on(
    capsys: pytest.CaptureFixture[str], step: int, whence: str
) -> None:
    died = {"reason": "killed by SIGKILL", "attempt": 2, "of": 5, "in_seconds": 3.6, "last_lines": ["[1] bye"]}
    recovered = {"model": "tiny", "seconds": 55.2, "step": step}
    out = printed(capsys, False, ("restarting", died), ("recovered", recovered))
    assert "engine: DIED: killed by SIGKILL\n" in out and "| [1] bye\n" in out
    assert "starting it again in 4 s (2 of 5)" in out
    assert "serves again after 55 s" in out and whence in out


def test_people_read_whether_a_step_could_learn_anything(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"swarm/reward_mean": 1.0, "swarm/reward_std": 0.0, "swarm/tasks": 4.0, "swarm/tasks_with_signal": 0.0}
    out = printed(capsys, False, ("step", STEP | {"metrics": metrics}))
    assert "reward 1.000 ±0.000  0 of 4 groups differ: nothing to learn  9.8 s" in out
    out = printed(capsys, False, ("step", STEP | {"metrics": metrics | {"swarm/tasks_with_signal": 3.0}}))
    assert "3 of 4 groups differ  9.8 s" in out


def test_people_read_what_the_folder_holds_and_what_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    going_on = {"step": 7, "saved": 6, "run_dir": "runs/x"}
    out = printed(capsys, False, ("going_on", going_on), ("going_on", going_on | {"saved": 0}))
    first, second = out.splitlines()
    assert "goes on with the run in runs/x: 7 steps are done, training continues from the checkpoint of step 6" in first
    assert "continues from the job's model: there is no checkpoint" in second
    out = printed(capsys, False, ("rolled_back", going_on | {"saved": 3, "kept": "runs/x/checkpoints/earlier-1"}))
    assert "goes back to step 3 of the run in runs/x, which had done 7; what it saved later is kept in runs/x/" in out
    out = printed(capsys, False, ("rolled_back", going_on | {"saved": 7, "kept": None}))
    assert "which had done 7\n" in out
    out = printed(capsys, False, ("unsaved", {"step": 9, "saved": 6}))
    assert "WARNING: steps 7 to 9 are not saved; the next start goes on from step 6" in out
    out = printed(capsys, False, ("unsaved", {"step": 3, "saved": 2}))
    assert "WARNING: step 3 is not saved; the next start goes on from step 2" in out


def test_a_failure_shows_its_last_lines_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(
        capsys,
        False,
        ("failed", {"message": "the engine died", "last_lines": ["[red]x[/red]"], "log": "/x/engine.log"}),
    )
    assert "FAILED: the engine died" in out
    assert "| [red]x[/red]" in out
    assert "/x/engine.log" in out


def test_of_several_jobs_each_line_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(
        capsys,
        False,
        ("step", {"job": "solver", **STEP}),
        ("ready", {"job": "planner", "model": "tiny", "seconds": 61.0}),
    )
    assert "solver: step    3" in out and "planner: ready after 61 s" in out


def test_states_are_for_the_spinner_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, False, ("state", {"state": "ENGINE.ROLLING", "detail": ""})) == ""


def test_a_training_tells_its_evaluations_and_what_its_steps_measured(capsys: pytest.CaptureFixture[str]) -> None:
    result = {"step": 4, "finished": 31, "failed": 1, "mean_reward": 0.51, "success_rate": 0.45}
    failed = {"step": 6, "finished": 0, "failed": 8, "mean_reward": None, "success_rate": None}
    measured = {"swarm/reward_mean": 0.4, "swarm/success_rate": 0.25, "swarm/calls_mean": 2.5}
    events = [
        ("ready", {"model": "tiny", "seconds": 61.0}),
        ("evaluating", {"step": 4}),
        ("step", STEP | {"metrics": measured}),
        ("evaluation", result),
        ("evaluation", failed),
    ]
    out = printed(capsys, False, *events)
    assert "training begins (model tiny)" in out and "evaluating" not in out
    assert "step    3  reward 0.400  success 25%  9.8 s  2.5 calls" in out
    assert "evaluation of step 4: reward 0.510, success 45% (31 episodes, 1 failed)" in out
    assert "evaluation of step 6: all 8 episodes failed" in out


def test_colours_that_are_forced_draw_no_spinner_into_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert printed(capsys, False) == ""


TOLD = """
import sys
from gateway.cli.up import event_printer
with event_printer({}) as on_event:
    on_event("warning", {{"message": "steps are lost"}})
    on_event("warning", {{"message": "and again"}})
    print("it went on", file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("as_json", [True, False])
def test_a_log_on_a_full_disk_ends_nothing(as_json: bool) -> None:
    command = [sys.executable, "-c", TOLD.format(as_json)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr.startswith("it went on\n")


@pytest.mark.parametrize("as_json", [True, False])
def test_a_reader_that_is_gone_ends_nothing(as_json: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", TOLD.format(as_json)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.stderr.startswith("it went on\n")


def test_a_training_that_fails_where_nobody_reads_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(plan: object, on_event: object, work: TrainCommand) -> None:
        common: dict[str, Any] = {"label": "run", "data": "t", "model": "tiny", "seconds": 1.0, "steps": []}
        work.report = TrainingReport(**common, workflow="my:solve", finished=0, failed=64)
        raise ConfigError("all episodes fail")

    def gone(message: str, **_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("gateway.launch.up.run_up", fails)
    monkeypatch.setattr("gateway.cli.checks.check_plan", lambda _: [])
    monkeypatch.setattr("typer.echo", gone)
    (tmp_path / "tasks.jsonl").write_text('{"question": "1 + 1?"}\n')
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    file = tmp_path / "my.yaml"
    file.write_text("{job: {model: tiny}, workflow: 'builtins:print', tasks: {train: tasks.jsonl}, swarm: {port: 0}}")
    assert CliRunner().invoke(app, ["train", str(file), "--report", str(tmp_path / "told"), "--json"]).exit_code == 2
    assert (tmp_path / "told" / "report.json").exists()


def test_a_route_that_a_client_names_does_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    moved = {"stage": "canary 5%", "challenger": 3, "by": "the verdict", "why": "not worse", "waits": False}
    out = printed(capsys, False, ("stage", {"route": "mine\x1b]0;owned\x07\n    1.0 s  all stopped", **moved}))
    assert "\x1b" not in out and "\x07" not in out
    assert len(out.splitlines()) == 1 and "by the verdict: not worse" in out
    # a hook's error quotes an answer, and a log of JSON brings it as it was
    out = printed(capsys, False, ("hook_failed", {"code": "hook_error", "sentence": "it raised E('\x1b[2J')"}))
    assert "\x1b" not in out and "it raised E" in out


def test_train_has_no_gateway_and_no_users(capsys: pytest.CaptureFixture[str]) -> None:
    died: dict[str, object] = {"reason": "bye", "attempt": 1, "of": 5, "in_seconds": 2.0}
    place: dict[str, object] = {"path": "/x/run", "holds": "journal and logs"}
    events = [("restarting", died), ("disk_full", place)]
    told = "the gateway stays", "users are answered"
    out = printed(capsys, False, *events)
    assert "(1 of 5)\n" in out and "meanwhile nothing is trained" in out and not any(each in out for each in told)
    gateway: dict[str, object] = {"name": "gateway", "url": "http://127.0.0.1:8000", "log": "/x/gateway.log"}
    out = printed(capsys, False, ("listening", gateway), *events)
    assert all(each in out for each in told)


def test_people_read_which_disk_is_full_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    place = {"path": "/x/run", "holds": "journal and logs, checkpoints"}
    out = printed(capsys, False, ("disk_full", place), ("disk_free", place))
    assert "WARNING: the disk of /x/run is full (journal and logs, checkpoints): free some space there" in out
    assert "the disk of /x/run has room again" in out


@pytest.mark.slow
def test_a_hangup_while_the_file_is_checked_ends_nothing(tmp_path: Path) -> None:
    """As `systemctl reload` right behind a start."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    (tmp_path / "rewards.py").write_text(
        "import os, pathlib, signal\npathlib.Path('loaded').touch()\nos.kill(os.getpid(), signal.SIGHUP)\n"
        "def hooks(task, candidates, context):\n    return [0.0 for _ in candidates]\n"
    )
    file = tmp_path / "my.yaml"
    file.write_text("job: {model: tiny}\ngateway: {port: 0, hooks: 'rewards:hooks'}\nswarm: {port: 0}\n")
    command = [sys.executable, "-m", "gateway.cli", "up", str(file), "--check"]
    done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (tmp_path / "loaded").exists(), done.stderr
    # where no engine is installed, it says so
    assert done.returncode in (0, 2), done.stderr
