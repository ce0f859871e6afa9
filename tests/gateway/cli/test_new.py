"""``swarm-gateway new``: what it makes runs as it is, against a stand-in."""

import json
import runpy
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from gateway.cli.root import app
from gateway.config.gateway import read_config
from gateway.routing.plan import Plan
from gateway.scaffold import scaffold
from swarm.errors import ConfigError
from swarm.job import parse_job

ROOT = Path(__file__).parents[3]


def make(name: str, parent: Path) -> Path:
    done = CliRunner().invoke(app, ["new", name, "--into", str(parent)], catch_exceptions=False)
    assert done.exit_code == 0
    return parent / f"opencode_build_{name.replace('-', '_')}"


def test_the_folder_is_complete_and_named(tmp_path: Path) -> None:
    made = make("polite-agent", tmp_path / "tutorial")
    names = {path.name for path in made.iterdir()}
    assert {"on_compute_relative_reward.py", "on_user_submit_new_requests.py", "mock_user_request.py"} <= names
    assert {"README.md", "config.yaml", "prompts.jsonl", "groups.jsonl"} <= names
    assert (made / "README.md").read_text().startswith("# polite_agent")
    assert not any("NAME_OF" in path.read_text() for path in made.iterdir())
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    sections = yaml.safe_load((made / "config.yaml").read_text())
    parse_job(yaml.safe_dump(sections["job"]))
    assert read_config(sections["gateway"], folder=made).hooks == str(made)


def test_it_answers_whatever_model_an_app_asks_for(tmp_path: Path) -> None:
    made = make("x", tmp_path)
    sections = yaml.safe_load((made / "config.yaml").read_text())
    [route] = Plan.of(read_config(sections["gateway"], folder=made)).routes
    assert route.is_default


def test_what_its_users_import_is_there(tmp_path: Path) -> None:
    assert callable(runpy.run_path(str(make("x", tmp_path) / "mock_user_request.py"))["main"])


def test_the_commands_that_it_prints_can_be_run_as_they_stand(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["new", "x", "--into", str(tmp_path / "my agents")], catch_exceptions=False)
    made = str(tmp_path / "my agents" / "opencode_build_x")
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("  ")]
    assert commands == [
        ["swarm-gateway", "hooks", "test", made, "--data", f"{made}/groups.jsonl"],
        ["swarm-gateway", "up", f"{made}/config.yaml"],
    ]


def test_nothing_that_is_there_is_touched(tmp_path: Path) -> None:
    made = scaffold("x", tmp_path)
    (made / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        scaffold("x", tmp_path)
    assert (made / "README.md").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"cannot make .*opencode_build_x"):
        scaffold("x", made / "README.md")


@pytest.mark.parametrize("name", ["", "1x", "../x", "Großes", "a b"])
def test_names_that_will_not_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a name"):
        scaffold(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_its_reward_recovers_the_order_of_its_own_groups(tmp_path: Path) -> None:
    made = make("x", tmp_path)
    command = ["hooks", "test", str(made), "--data", str(made / "groups.jsonl"), "--json"]
    report = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert (report["tau_rank"], report["flip_rate"], report["failed"]) == (1.0, 0.0, {})
