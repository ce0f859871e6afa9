"""The translation tutorial as it ships: its sentences, its grader, and its readme with a real server and client."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from swarm.importer import SourceFolder
from swarm.types import Task
from tests.tutorial.readmes import TUTORIALS

FOLDER = TUTORIALS / "opencode_build_translation_agent"
TASK = Task(
    task_id="t",
    main_query="The server needs 7 minutes, the router needs an hour.",
    metadata={"terms": {"server": "serveur", "router": "routeur"}},
)
RIGHT = "Le serveur a besoin de 7 minutes, le routeur a besoin d'une heure."


@pytest.fixture(scope="module")
def grader() -> ModuleType:
    return SourceFolder(FOLDER).module("grader")


def test_the_sentences_are_what_the_script_writes() -> None:
    rows = [json.loads(line) for line in (FOLDER / "sentences.jsonl").read_text().splitlines()]
    assert rows == SourceFolder(FOLDER).module("make_sentences").rows()
    for row in rows:
        assert all(term in row["question"] for term in row["terms"])


@pytest.mark.parametrize(
    ("final", "errors"),
    [
        (RIGHT.replace("a besoin d'une", "veut une"), []),
        ("Here is the translation: " + RIGHT.replace("a besoin d'une", "veut une"), ["talks"]),
        ("Le serveur a besoin de 7 minutes, le router une heure.", ["misses_a_term"]),
        ("Le serveur a besoin de 8 minutes, le routeur une heure.", ["changes_a_number"]),
        ("Le serveur de 7, le routeur de, le serveur de minutes.", ["repeats_itself"]),
        ("serveur 7 routeur", ["has_another_length"]),
        (TASK.main_query, ["misses_a_term", "untranslated"]),
    ],
)
def test_each_error_has_a_name(grader: ModuleType, final: str, errors: list[str]) -> None:
    assert grader.errors_of(TASK, final) == errors
    assert 0 <= grader.reward_of(errors) <= 1


def test_episodes_are_shown_whatever_separators_of_unicode_are_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = {"prompts": 1, "masked": 0, "trained": 1, "calls": 1, "timelines": 1, "unmerged": 2}
    row = {"step": 1, "reward": 0.5, "components": {"error/talks": 1.0}, "tokens": tokens, "timelines": []}
    episodes = tmp_path / "episodes.jsonl"
    text = json.dumps(row | {"output": {"metadata": {"final": "un\u2028deux"}}}, ensure_ascii=False)
    episodes.write_text(text + "\n", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["show.py", str(episodes)])
    assert SourceFolder(TUTORIALS / "opencode_build_translation_agent").module("show").main() == 0
    assert "reward 0.50" in capsys.readouterr().out


def test_nothing_is_worth_nothing(grader: ModuleType) -> None:
    assert grader.errors_of(TASK, " \n") == grader.errors_of(TASK, "7") == list(grader.PATTERNS)
    assert grader.reward_of(list(grader.PATTERNS)) == 0.0


def check_readme(folder: Path, said: str) -> None:
    """What the commands of its readme leave; see ``test_readmes.py``."""
    rows = [json.loads(line) for line in (folder / "runs" / "episodes.jsonl").read_text().splitlines()]
    assert len(rows) >= 2 * 4 * 4
    # three calls of an episode are one row of the trainer
    assert all((row["tokens"]["calls"], row["tokens"]["timelines"]) == (3, 1) for row in rows)
    assert "3 calls -> 1 timeline(s)" in said and "misses_a_term" in said
    assert "0 failed" in said
    assert "errors: " in said
