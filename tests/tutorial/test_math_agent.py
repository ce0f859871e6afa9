"""The math tutorial as it ships: its problems, its agent, and its readme with real servers and client processes."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import ModuleType

import pytest
from study.curves import Curve, permuted

from swarm.importer import SourceFolder
from swarm.types import WorkflowOutput
from tests.standins.vllm import ScriptedVllm, listening
from tests.tutorial.pupil import Pupil
from tests.tutorial.readmes import TUTORIALS

FOLDER = TUTORIALS / "opencode_build_math_agent"


@pytest.fixture(scope="module")
def agent() -> ModuleType:
    return SourceFolder(FOLDER).module("agent_run")


def test_the_problems_are_what_the_script_writes_and_share_no_sum_not_even_swapped() -> None:
    script = SourceFolder(FOLDER).module("make_problems")
    sums: dict[str, set[tuple[bool, int, int]]] = {}
    for part in ("train", "held_out"):
        rows = [json.loads(line) for line in (FOLDER / f"{part}.jsonl").read_text().splitlines()]
        assert rows == script.rows(part)
        words = [row["question"].replace(".", "").split() for row in rows]
        sums[part] = set()
        for row, one in zip(rows, words, strict=True):
            a, b = (int(word) for word in one if word.isdigit())
            sums[part].add((True, min(a, b), max(a, b)) if "buys" in one else (False, a, b))
            assert row["answer"] == (a + b if "buys" in one else a - b)
    assert not sums["train"] & sums["held_out"]


def test_the_last_number_decides(agent: ModuleType) -> None:
    answers = ["4 + 5 = 9", "9.", "It is 9, not 8", "-9", "19", "nine", ""]
    assert [agent.judge(answer, 9) for answer in answers] == [1, 1, 0, 0, 0, 0, 0]


def test_the_calculator_answers_or_says_what_is_wrong(agent: ModuleType) -> None:
    assert agent.calculate('{"a": 4, "sign": "+", "b": 5}') == "9"
    assert agent.calculate('{"a": 4, "sign": "-", "b": 5}') == "-1"
    for wrong in ("", "{}", "[1]", '{"a": "four", "sign": "+", "b": 5}', '{"a": null, "sign": "+", "b": 5}'):
        assert agent.calculate(wrong).startswith("error: ")


@pytest.mark.anyio
@pytest.mark.parametrize(("share", "said"), [(1.0, "The calculator says 9."), (0.0, "The calculator says error: call")])
async def test_the_agent_calls_the_calculator_where_it_may(agent: ModuleType, share: float, said: str) -> None:
    from openai import OpenAI

    pupil = Pupil()
    pupil.share = share
    question = "Anna has 4 apples and buys 5 more. How many apples does Anna have now?"
    async with listening(ScriptedVllm(pupil.answer).app) as url:
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answer, calls = await asyncio.to_thread(agent.solve, question, client, True)
    assert (answer.startswith(said), calls) == (True, 2)


def test_the_control_permutes_the_rewards_of_a_group() -> None:
    outputs = [WorkflowOutput(reward=float(n), is_success=n > 3, metadata={"answer": n}) for n in range(8)]
    mixed = permuted(outputs, random.Random(0))
    assert sorted(one.reward for one in mixed) == [one.reward for one in outputs]
    assert [one.reward for one in mixed] != [one.reward for one in outputs]
    assert [one.metadata["answer"] for one in mixed] == list(range(8))


def check_readme(folder: Path, said: str) -> None:
    """What the commands of its readme leave; see ``test_readmes.py``."""
    trained = Curve.model_validate_json((folder / "runs" / "quick" / "curve.json").read_text())
    assert not trained.shuffled
    assert [one.step for one in trained.points] == [0, 2]
    before, after = (one.scores["held-out accuracy"].mean for one in trained.points)
    assert after > before
    assert "from held-out accuracy" in said
