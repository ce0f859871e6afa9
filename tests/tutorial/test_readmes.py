"""Every readme of a tutorial does what it says: its commands, in their order, in their quick forms, with real servers,
hooks, users and client processes; only the engine process is a stand-in.

A tutorial has to be in no list. ``test_NAME.py`` may have functions for this: ``prepare(folder, monkeypatch)`` before,
``check_readme(folder, said)`` while the servers run, and ``check_quick(folder, said)`` after the commands that
start what they need themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli.sections import parse_server, read_plan
from reward_hooks import load_hooks
from swarm.job import read_job
from tests.processes import nothing_left_behind
from tests.tutorial.readmes import (
    TUTORIALS,
    commands,
    folder_of,
    following,
    quick_alone,
    readme_of,
    run,
    tutorial_copy,
    wrong_commands,
)

NAMES = sorted(one.parent.name.removeprefix("opencode_build_") for one in TUTORIALS.glob("*/readme.md"))


def own(name: str, function: str) -> Any:
    """What the tutorial's own test module has as ``function``, or something that does nothing."""
    module = f"{__package__}.test_{name}"
    found = importlib.util.find_spec(module) and getattr(importlib.import_module(module), function, None)
    return found or (lambda *_: None)


def test_every_tutorial_has_a_readme() -> None:
    folders = {one.name for one in TUTORIALS.iterdir() if any(one.glob("*.py")) and one.name != "study"}
    assert folders == {folder_of(one).name for one in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_tutorial_has_the_same_shape(name: str) -> None:
    folder, text = folder_of(name), readme_of(name)
    steps = commands(text)
    if any("smollm2-135m" in one.read_text() for one in folder.glob("*.yaml")):
        assert steps[0][-3:] == ["models", "pull", "smollm2-135m"]
    assert any("--quick" in one for one in steps)
    assert wrong_commands(name) == []
    if folder.name.startswith("opencode_build_"):
        assert "**Data" in text and "What " in text and "| file |" in text
        listed = [one for one in folder.iterdir() if one.suffix in (".py", ".yaml")]
        assert all(f"`{one.name}`" in text for one in listed), "the table names every file"


async def unchecked(*_: object) -> None:
    """In place of the check of a job by verl's adapter: the commands of the readmes make it."""


@pytest.mark.usefixtures("model_and_engine")
@pytest.mark.parametrize(
    "file", sorted(TUTORIALS.glob("opencode_build_*/*.yaml")), ids=lambda one: f"{one.parent.name}/{one.name}"
)
def test_every_configuration_of_a_tutorial_is_valid(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.server.engine.changes.check_job", unchecked)
    # where the file's own modules are imported from
    monkeypatch.setattr(sys, "path", [*sys.path])
    match file.name:
        case "config.yaml" | "up.yaml":
            assert read_plan(file).servers
        case "job.yaml":
            assert read_job(file).model_name == "smollm2-135m"
        case "swarm.yaml":
            parse_server(yaml.safe_load(file.read_text()), str(file), file.parent)
        case _:
            load_hooks(file)


def test_a_command_that_would_be_refused_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--steps', type=int)\n"
    (tmp_path / "roll.py").write_text(f"{script}parser.parse_args()\nraise RuntimeError('it was run')")
    (tmp_path / "plain.py").write_text("raise RuntimeError('it was run')")
    right = [
        "python roll.py --steps 3",
        "python plain.py",
        "swarm-gateway up file-of-another-command.yaml",
        "swarm-gateway swarm export --run-dir r --out o",
    ]
    wrong = [
        "python roll.py --stops 3",
        "python roll.py --steps many",
        "python plain.py --steps 3",
        "python gone.py",
        "python gone.py --steps 3",
        "swarm-gateway down x.yaml",
        "swarm-gateway swarm export --into o",
        "swarm-gateway swarm start --port many --run-dir r",
        "swarm-gateway up",
    ]
    (tmp_path / "readme.md").write_text("\n".join(["```bash", *right, *wrong, "```"]))
    monkeypatch.setattr("tests.tutorial.readmes.folder_of", lambda name: tmp_path)
    found = wrong_commands("mine")
    assert len(found) == len(wrong), found
    for line, command in zip(found, wrong, strict=True):
        assert line.startswith(f"{command.removeprefix('python ').replace('swarm-gateway', '-m gateway.cli')}: ")


def test_a_process_that_a_command_leaves_behind_is_found_though_its_parent_has_ended(tmp_path: Path) -> None:
    orphan = "[sys.executable, '-c', 'import time; time.sleep(600)']"
    (tmp_path / "leave.py").write_text(
        f"import subprocess, sys\nsubprocess.Popen({orphan}, stdout=-3, stderr=-3, start_new_session=True)"
    )
    (tmp_path / "readme.md").write_text("```sh\npython leave.py\n```")
    with (
        pytest.raises(AssertionError, match=r"left behind: .*sleep\(600\)"),
        nothing_left_behind(),
        following(tmp_path),
    ):
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("model_and_engine")
@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_the_readme_does_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tutorial_copy(name, tmp_path)
    with nothing_left_behind(5.0):
        own(name, "prepare")(folder, monkeypatch)
        with following(folder) as said:
            own(name, "check_readme")(folder, said)
        own(name, "check_quick")(folder, "".join(run(command, folder) for command in quick_alone(name)))
    journals = list(folder.glob("**/journal.db"))
    assert journals and all(one.stat().st_size for one in journals)
