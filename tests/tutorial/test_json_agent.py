"""The JSON tutorial as it ships: its prompts, its hooks, its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from study.experiment import ExperimentError

from reward_hooks import HookRunner, load_hooks
from reward_hooks.contract import Candidate, HookContext, UserRequest
from swarm.data import read_tasks
from swarm.errors import HookError
from swarm.importer import SourceFolder
from swarm.types import Task
from tests.tutorial.conftest import score

pytest.importorskip("jsonschema")

FOLDER = Path(__file__).parents[2] / "tutorial" / "opencode_build_json_agent"
ANNA: dict[str, Any] = {"name": "Anna", "age": 30, "city": "Oslo", "job": "nurse"}


@pytest.fixture
def hooks() -> HookRunner:
    return HookRunner(load_hooks(FOLDER / "hooks.yaml"))


def test_the_prompts_are_what_the_script_writes_and_share_no_word() -> None:
    script = SourceFolder(FOLDER).module("make_prompts")
    people: dict[str, list[dict[str, Any]]] = {}
    for part in ("train", "held_out"):
        rows = [json.loads(line) for line in (FOLDER / f"{part}.jsonl").read_text().splitlines()]
        assert rows == script.rows(part)
        people[part] = [row["person"] for row in rows]
    for key in ("name", "city", "job"):
        train, held_out = ({person[key] for person in people[part]} for part in ("train", "held_out"))
        assert not train & held_out


@pytest.mark.anyio
async def test_form_and_content_both_count(hooks: HookRunner) -> None:
    texts = [
        json.dumps(ANNA),
        json.dumps(ANNA | {"job": "pilot"}),
        json.dumps(ANNA) + " There you are.",
        json.dumps(ANNA | {"age": "30"}),
        "Anna is a nurse.",
    ]
    candidates = [
        Candidate(index=index, message={"role": "assistant", "content": text}, text=text)
        for index, text in enumerate(texts)
    ]
    score = await hooks.score(Task(task_id="t", metadata={"person": ANNA}), candidates, HookContext(num_repeat=5))
    # weights 1 (JSON), 1 (schema), 2 (values)
    assert score.values == pytest.approx([1.0, 0.875, 0.5, 0.625, 0.0])
    assert "wrong: job" in score.rewards[1].reason


@pytest.mark.anyio
async def test_the_task_says_who_it_is_about_and_strangers_are_refused(hooks: HookRunner) -> None:
    known = next(read_tasks(FOLDER / "train.jsonl"))
    context = HookContext(num_repeat=3)
    body = {"messages": known.init_messages}
    submission = await hooks.submit(UserRequest(request_id="r", body=body), context)
    assert submission.task.metadata["person"] == known.metadata["person"]
    assert submission.requests == [body] * 3
    stranger = UserRequest(request_id="r", body={"messages": [{"role": "user", "content": "Who?"}]})
    with pytest.raises(HookError) as caught:
        await hooks.submit(stranger, context)
    assert caught.value.code == "no_reference"


def test_a_control_is_added_to_what_is_there_and_to_nothing_else(tmp_path: Path) -> None:
    script = SourceFolder(FOLDER).module("experiment")
    with pytest.raises(ExperimentError, match="run without --only-control first"):
        script.trained(tmp_path)
    base = score("base")
    scores = [base, score("control")]
    (tmp_path / script.REPORT_FILE).write_text(script.Result(runs=[], scores=scores).model_dump_json())
    assert script.trained(tmp_path) == script.Result(runs=[], scores=[base])


def check_readme(folder: Path, said: str) -> None:
    """What the commands of its readme leave; see ``test_readmes.py``."""
    assert "held-out prompts prove more" in said


def check_quick(folder: Path, said: str) -> None:
    """What the experiment leaves."""
    assert "held-out" in said
    [result] = folder.glob("**/experiment.json")
    assert len(json.loads(result.read_text())["scores"]) == 2
