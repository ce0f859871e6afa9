"""``swarm-gateway hooks test`` from outside."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.root import app
from swarm.errors import ConfigError

GROUPS = [
    {"prompt": "q [1]?", "candidates": ["one", "three words here"], "rank": [2, 1]},
    {"prompt": "none", "candidates": ["same", "same"]},
    {"prompt": "bad", "candidates": ["boom", "b"]},
]
REWARD = """
from reward_hooks.contract import Reward
from swarm.errors import HookError

def on_compute_relative_reward(task, candidates, context):
    if task.main_query == "bad":
        raise HookError("cannot tell [at all]", code="unsure")
    counts = [len(candidate.text.split()) for candidate in candidates]
    return [Reward(value=count, components={"words": count}, reason="[why]") for count in counts]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "on_compute_relative_reward.py").write_text(REWARD)
    (tmp_path / "groups.jsonl").write_text("\n".join(json.dumps(group) for group in GROUPS))
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    command = ["hooks", "test", str(folder), "--data", str(folder / "groups.jsonl"), *arguments]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    return done.exit_code, done.stdout


def test_rankings_reasons_and_numbers_are_printed(folder: Path) -> None:
    code, out = run(folder, "--against", str(folder), "--show", "3")
    assert code == 0
    assert "q [1]?" in out
    assert "[why]" in out
    assert "2 of 3 scored" in out
    assert "1 x unsure" in out
    assert "cannot tell [at all]" in out
    assert "1 with equal rewards" in out
    assert "+1.000 over 1 groups" in out
    assert "0.0% of pairs" in out
    # counted as `groups show` counts them
    assert "answer 1" in out and "answer 0" not in out


def test_json_is_one_line_and_nothing_else(folder: Path) -> None:
    code, out = run(folder, "--json", "--limit", "1")
    report = json.loads(out)
    assert code == 0
    assert (report["scored"], report["groups"][0]["order"], report["tau_rank"]) == (1, [1, 0], 1.0)
    assert report["groups"][0]["rewards"][1]["components"] == {"words": 3.0}


def test_what_a_hook_prints_is_not_in_the_report(folder: Path) -> None:
    file = folder / "on_compute_relative_reward.py"
    file.write_text("print('loading')\n" + REWARD.replace("    counts", "    print('judging')\n    counts"))
    command = ["hooks", "test", str(folder), "--data", str(folder / "groups.jsonl"), "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert json.loads(done.stdout)["scored"] == 2
    assert "loading" in done.stderr and "judging" in done.stderr


def test_the_time_of_a_call_is_that_of_the_gateway_whose_file_is_given(folder: Path) -> None:
    hangs = "import threading\n" + REWARD.replace("    counts", "    threading.Event().wait()\n    counts")
    (folder / "on_compute_relative_reward.py").write_text(hangs)
    file = folder / "up.yaml"
    file.write_text("job: {model: tiny}\ngateway: {hooks: '.', hook_timeout_seconds: 0.2}\n")
    command = ["hooks", "test", str(file), "--data", str(folder / "groups.jsonl"), "--limit", "1"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert (done.exit_code, "took longer than 0.2 s" in done.stdout) == (1, True)


def test_a_hook_that_scores_nothing_is_exit_code_1(folder: Path) -> None:
    (folder / "groups.jsonl").write_text(json.dumps(GROUPS[2]))
    assert run(folder)[0] == 1


def test_an_answer_in_the_words_of_a_failure_commands_no_terminal(folder: Path) -> None:
    (folder / "on_compute_relative_reward.py").write_text(
        "def on_compute_relative_reward(task, candidates, context):\n    raise ValueError(candidates[0].text)\n"
    )
    (folder / "groups.jsonl").write_text(json.dumps({"prompt": "q", "candidates": ["a\x1b]0;mine\x07", "b"]}))
    out = run(folder)[1]
    assert "]0;mine" in out and "\x1b" not in out


def test_no_groups_are_an_error(folder: Path) -> None:
    (folder / "groups.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no group"):
        run(folder)


def test_a_hook_that_fails_is_told_in_the_report_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    code, out = run(folder, "--show", "0")
    assert code == 0 and "1 x unsure" in out
    assert not [one for one in caplog.records if one.name.startswith("reward_hooks")]
