"""The readmes of the tutorials whose application asks the gateway do what they say: every command, in its order, with
real servers, hooks and users; only the engine process is a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tutorial.readmes import TUTORIALS, commands, follow, unknown_options

NAMES = sorted(one.name.removeprefix("opencode_build_") for one in TUTORIALS.glob("opencode_build_*"))


@pytest.mark.parametrize("name", NAMES)
def test_every_tutorial_has_the_same_shape(name: str) -> None:
    folder = TUTORIALS / f"opencode_build_{name}"
    text = (folder / "readme.md").read_text()
    steps = commands(text)
    if any("smollm2-135m" in one.read_text() for one in folder.glob("*.yaml")):
        assert steps[0][-3:] == ["models", "pull", "smollm2-135m"]
    assert any("--quick" in one for one in steps)
    assert "**Data" in text and "What " in text and "| file |" in text
    assert unknown_options(name) == []
    listed = [one for one in folder.iterdir() if one.suffix in (".py", ".yaml")]
    assert all(f"`{one.name}`" in text for one in listed), "the table names every file"


@pytest.mark.slow
@pytest.mark.usefixtures("model_and_engine")
@pytest.mark.parametrize("name", ["concise_agent", "json_agent"])
def test_the_readme_does_what_it_says(name: str, tmp_path: Path) -> None:
    folder, said = follow(name, tmp_path)
    assert "mean reward" in said
    [journal] = folder.glob("runs/*/journal.db")
    assert journal.stat().st_size
