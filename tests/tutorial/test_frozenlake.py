"""The frozen lake as it ships: its lakes, its environment, the walk and its reward, and its readme with a server."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from study.curves import Curve

from swarm.importer import SourceFolder
from tests.standins.vllm import ScriptedVllm, listening
from tests.tutorial.pupil import Pupil
from tests.tutorial.readmes import TUTORIALS

FOLDER = TUTORIALS / "opencode_build_frozenlake"
LAKE = ["SFF", "FHF", "FFG"]


@pytest.fixture(scope="module")
def agent() -> ModuleType:
    return SourceFolder(FOLDER).module("agent_run")


@pytest.fixture(scope="module")
def making() -> ModuleType:
    return SourceFolder(FOLDER).module("make_lakes")


def test_the_lakes_are_what_the_script_writes_and_can_be_crossed(making: ModuleType) -> None:
    lakes: dict[str, set[str]] = {}
    for part, each in making.EACH.items():
        rows = [json.loads(line) for line in (FOLDER / f"{part}.jsonl").read_text().splitlines()]
        assert rows == making.rows(part)
        distances = [making.distance(row["question"].split("/")) for row in rows]
        assert distances == [far for far in (1, 2, 3, 4) for _ in range(each)]
        lakes[part] = {row["question"] for row in rows}
        assert len(lakes[part]) == len(rows)
    assert not lakes["train"] & lakes["held_out"]


@pytest.mark.parametrize(
    ("moves", "cells", "reward", "terminated", "truncated"),
    [
        ("right right down down", [1, 2, 5, 8], 1.0, True, False),
        ("right down", [1, 4], 0.0, True, False),
        ("left up right", [0, 0, 1], 0.0, False, False),
        ("right left right left right left", [1, 0, 1, 0, 1, 0], 0.0, False, True),
        ("left left right right down down", [0, 0, 1, 2, 5, 8], 1.0, True, True),
    ],
)
def test_the_lake_is_gymnasiums(
    agent: ModuleType, moves: str, cells: list[int], reward: float, terminated: bool, truncated: bool
) -> None:
    env = agent.FrozenLake(LAKE)
    assert env.reset(seed=3) == (0, {})
    steps = [env.step(agent.MOVES.index(move)) for move in moves.split()]
    assert [cell for cell, *_ in steps] == cells
    assert steps[-1][1:] == (reward, terminated, truncated, {})
    assert all(one[1:] == (0.0, False, False, {}) for one in steps[:-1])
    assert env.reset() == (0, {})


def test_the_model_is_told_where_it_stands(agent: ModuleType) -> None:
    assert agent.seen(LAKE, 3) == (
        "Left is the edge, down is ice, right is a hole, up is ice. The goal is 1 down and 2 right."
    )
    assert agent.seen(["GFS", "FHF"], 4).endswith("up is ice. The goal is 1 up and 1 left.")


def test_a_later_goal_is_worth_less(agent: ModuleType) -> None:
    assert [agent.discounted(one) for one in ([1.0], [0.0, 0.0, 1.0], [0.0, 0.0], [])] == [1.0, 0.9**2, 0, 0]


@pytest.mark.anyio
@pytest.mark.parametrize(("share", "rewards"), [(1.0, [0.0, 0.0, 0.0, 1.0]), (0.0, [])])
async def test_a_walk_is_one_conversation(agent: ModuleType, share: float, rewards: list[float]) -> None:
    from openai import OpenAI

    pupil = Pupil()
    pupil.share = share
    vllm = ScriptedVllm(pupil.answer)
    async with listening(vllm.app) as url:
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            walked = await asyncio.to_thread(agent.walk, agent.FrozenLake(LAKE), LAKE, client)
    assert walked[1] == rewards
    bodies = [body for _, body in vllm.requests]
    assert len(bodies) == max(1, len(rewards))
    for before, after in pairwise(bodies):
        assert after["messages"][: len(before["messages"])] == before["messages"]


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the lakes whose goal is one move away out of training: two steps of them would have no longer walk."""
    file = folder / "train.jsonl"
    rows = file.read_text().splitlines(keepends=True)
    file.write_text("".join(rows[len(rows) // 4 :]))


def check_readme(folder: Path, said: str) -> None:
    """What the commands of its readme leave; see ``test_readmes.py``."""
    before, after = Curve.model_validate_json((folder / "runs" / "quick" / "curve.json").read_text()).points
    assert before.step == 0 and after.step >= 2  # the engine may take one more before the last walks end
    assert after.scores["success"].mean > before.scores["success"].mean >= before.scores["return"].mean
    assert ": the goal" in said or ": not the goal" in said
    rows = [json.loads(line) for line in (folder / "runs" / "episodes.jsonl").read_text().splitlines()]
    # all calls of a walk are one row of the trainer
    assert {row["tokens"]["timelines"] for row in rows} == {1}
    assert max(row["tokens"]["calls"] for row in rows) >= 2
