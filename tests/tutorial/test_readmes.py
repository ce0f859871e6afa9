"""Every readme of a tutorial does what it says: its commands, in their order, in their quick forms, with real servers,
hooks, users and client processes; only the engine process is a stand-in.

A tutorial has to be in no list. ``test_NAME.py`` may have functions for this: ``prepare(folder, monkeypatch)`` before,
``check_readme(folder, said)`` while the servers run, and ``check_quick(folder, said)`` after the commands that
start what they need themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tutorial.readmes import (
    TUTORIALS,
    commands,
    folder_of,
    following,
    quick_alone,
    readme_of,
    run,
    tutorial_copy,
    unknown_options,
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
    assert unknown_options(name) == []
    if folder.name.startswith("opencode_build_"):
        assert "**Data" in text and "What " in text and "| file |" in text
        listed = [one for one in folder.iterdir() if one.suffix in (".py", ".yaml")]
        assert all(f"`{one.name}`" in text for one in listed), "the table names every file"


def test_a_command_or_an_option_that_is_not_there_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "users.py").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "roll.py").write_text('parser.add_argument("--steps")')
    lines = [
        "python roll.py --steps 3",
        "python roll.py --stops 3",
        "swarm-gateway up x.yaml",
        "swarm-gateway down x.yaml",
    ]
    lines += [
        "swarm-gateway swarm export --run-dir r --out o",
        "swarm-gateway swarm export --into o",
        "swarm-gateway up",
    ]
    (tmp_path / "mine" / "readme.md").write_text("```bash\n" + "\n".join(lines) + "\n```\n")
    monkeypatch.setattr("tests.tutorial.readmes.TUTORIALS", tmp_path)
    monkeypatch.setattr("tests.tutorial.readmes.folder_of", lambda name: tmp_path / name)
    script, *refused = unknown_options("mine")
    assert script == "roll.py --stops"
    assert [one.partition(":")[0] for one in refused] == [
        "swarm-gateway down x.yaml",
        "swarm-gateway swarm export --into o",
        "swarm-gateway up",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("model_and_engine")
@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_the_readme_does_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(psutil.Process().children(recursive=True))
    folder = tutorial_copy(name, tmp_path)
    own(name, "prepare")(folder, monkeypatch)
    with following(folder) as said:
        own(name, "check_readme")(folder, said)
    own(name, "check_quick")(folder, "".join(run(command, folder) for command in quick_alone(name)))
    journals = list(folder.glob("**/journal.db"))
    assert journals and all(one.stat().st_size for one in journals)
    assert set(psutil.Process().children(recursive=True)) == before, "a command left a process behind"
