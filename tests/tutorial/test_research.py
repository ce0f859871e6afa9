"""The research tutorial as it ships: its studies, its questions, and its readme with real servers and processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from swarm.importer import SourceFolder
from swarm.research.ledger import read
from swarm.research.study import Command, Grid, read_study
from tests.tutorial.readmes import TUTORIALS

FOLDER = TUTORIALS / "opencode_build_research"


def test_the_studies_are_valid_and_differ_in_what_their_names_say() -> None:
    studies = {path.parent.name: read_study(path.parent) for path in FOLDER.glob("*/study.yaml")}
    assert set(studies) == {"find_better", "nothing_to_find", "with_a_model"}
    find, nothing = studies["find_better"], studies["nothing_to_find"]
    assert (find.control, nothing.control) == ("none", "shuffle")
    same = {"question": "", "control": "none"}
    assert find.model_copy(update=same) == nothing.model_copy(update=same)
    assert isinstance(find.proposer, Grid) and isinstance(studies["with_a_model"].proposer, Command)
    assert find.is_locked("evaluate.py") and find.may_patch("agent.py")


def test_the_questions_are_what_the_script_writes() -> None:
    parts = SourceFolder(FOLDER).module("make_questions").parts()
    for name, rows in parts.items():
        assert [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()] == rows
    train, held_out = ({row["question"] for row in rows} for rows in parts.values())
    assert not train & held_out


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study's code is what git tracks."""
    for command in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", "-C", str(folder.parent), *command], check=True)


def check_readme(folder: Path, said: str) -> None:
    """What the commands of its readme leave; see ``test_readmes.py``."""
    state = read(folder / "find_better" / "runs" / "quick")
    assert [run.outcome for run in state.runs.values()] == ["done", "done"]
    assert "e1 scores" in said and "the rehearsal worked" in said
