"""The planner and the solver as they ship: their problems, their rewards, what a failure of one side leaves, and the
readme with real servers, one `up` and the loop."""

from __future__ import annotations

import argparse
import importlib.util
import json
import threading
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from study.curves import Curve

from swarm.client import RetryPolicy, SwarmClient
from swarm.errors import SwarmGatewayError
from swarm.importer import SourceFolder
from swarm.job import TrainJob
from swarm.states import EngineState
from swarm.status import EngineStatus, ServerStatus
from swarm.types import Task, WorkflowOutput
from tests.engine import tiny_model
from tests.swarm.client.scripted import Answer, ScriptedServer
from tests.tutorial.readmes import TUTORIALS, follow

FOLDER = TUTORIALS / "opencode_build_two_models"
TASK = Task(task_id="t", main_query="Anna has 4 apples, buys 5 more and gives away 3.", metadata={"answer": 6})


@pytest.fixture(scope="module")
def agent() -> ModuleType:
    return SourceFolder(FOLDER).module("agent_run")


@pytest.fixture(scope="module")
def roll() -> ModuleType:
    return SourceFolder(FOLDER).module("agent_roll")


def test_the_problems_are_what_the_script_writes_and_share_no_sum_in_any_order() -> None:
    script = SourceFolder(FOLDER).module("make_problems")
    sums: dict[str, set[tuple[int, ...]]] = {}
    for part in ("train", "held_out"):
        rows = [json.loads(line) for line in (FOLDER / f"{part}.jsonl").read_text().splitlines()]
        assert rows == script.rows(part)
        sums[part] = set()
        for row in rows:
            words = row["question"].replace(",", " ").replace(".", " ").split()
            a, b, c = (int(word) for word in words if word.isdigit())
            adds = row["question"].index("buys") < row["question"].index("gives")
            added, taken = ((a, b), c) if adds else ((a, c), b)
            assert row["answer"] == sum(added) - taken
            sums[part].add((*sorted(added), taken))
    assert not sums["train"] & sums["held_out"]


@pytest.mark.parametrize(
    ("plan", "answer", "planned", "solved", "together"),
    [
        ("4 + 5 - 3", "9 - 3 = 6", 1, 1, 1),
        ("4 + 5 - 3", "9", 1, 0, 0),
        ("4+5+3", "12", 0, 1, 0),
        ("4 + 5 + 3", "6", 0, 0, 1),
        ("I do not know.", "6", 0, 1, 1),
        ("I do not know.", "", 0, 0, 0),
    ],
)
def test_each_is_rewarded_for_its_own_part(
    agent: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    plan: str,
    answer: str,
    planned: float,
    solved: float,
    together: float,
) -> None:
    asked: list[str] = []

    def ask(api: Any, examples: Any, content: str) -> str:
        asked.append(content)
        return {"planner": plan, "solver": answer}[api]

    monkeypatch.setattr(agent, "ask", ask)
    outputs = agent.execute(TASK, "planner", "solver")
    assert [one.reward for one in outputs] == [planned, solved]
    assert outputs[0].log_metrics["together"] == together
    assert asked[1] == (plan if "4" in plan else TASK.main_query)


@pytest.mark.parametrize(("plan", "value"), [("3 - 4 + 10", 9), ("It is 2+2, or 5", 4), ("7", None), ("", None)])
def test_the_first_sum_of_a_plan_counts(agent: ModuleType, plan: str, value: int | None) -> None:
    assert agent.worth(plan) == value


def claimed(name: str) -> dict[str, Any]:
    episodes = [
        {"episode_uuid": f"{name}{n}", "openai_base_url": "http://x/v1", "openai_api_key": "k"} for n in range(2)
    ]
    return {"success": True, "client_uuid": "c", "episodes": episodes}


@pytest.fixture
def servers() -> Generator[list[ScriptedServer]]:
    with ScriptedServer() as planner, ScriptedServer() as solver:
        for name, server in (("p", planner), ("s", solver)):
            server.script("/claim_group", claimed(name))
            server.script("/abort_episode", {"success": True})
            server.script("/end_group", {"success": True})
        yield [planner, solver]


ROLLING = EngineStatus(engine_status=EngineState.ROLLING)
REFUSED = Answer({"error": {"message": "no"}}, 400)


@pytest.mark.parametrize(
    ("fails", "given_back"),
    [
        ("claim", [["p0", "p1"], []]),
        ("agent", [["p0", "p1"], ["s0", "s1"]]),
        ("end", [[], ["s0", "s1"]]),
        ("", [[], []]),
    ],
)
def test_a_failure_of_one_side_leaves_no_episode_open(
    roll: ModuleType,
    servers: list[ScriptedServer],
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    given_back: list[list[str]],
) -> None:
    together = threading.Barrier(2)

    def execute(task: Task, planner: Any, solver: Any) -> tuple[WorkflowOutput, WorkflowOutput]:
        together.wait(30)  # all pairs run at once
        if fails == "agent":
            raise RuntimeError("the solver is gone")
        assert planner.episode_uuid[1:] == solver.episode_uuid[1:]
        return WorkflowOutput(reward=1.0), WorkflowOutput(reward=0.0)

    monkeypatch.setattr(roll, "execute", execute)
    if fails in ("claim", "end"):
        servers[1].script(f"/{fails}_group", REFUSED)
    policy = RetryPolicy(attempts=1, total=5.0)
    failed = False
    with SwarmClient(servers[0].url, policy=policy) as planner, SwarmClient(servers[1].url, policy=policy) as solver:
        try:
            with roll.begun((planner, solver), 2) as groups:
                roll.end(TASK, groups, roll.run(TASK, groups))
        except (SwarmGatewayError, RuntimeError):
            failed = True
    assert failed == bool(fails)
    aborted = [sorted(body["episode_uuid"] for body in server.bodies("/abort_episode")) for server in servers]
    assert aborted == given_back
    if not fails:
        ends = [server.bodies("/end_group")[0]["ends"] for server in servers]
        assert [{one["workflow_output"]["reward"] for one in end} for end in ends] == [{1.0}, {0.0}]


def test_a_loop_whose_groups_all_fail_ends_with_the_reason(
    roll: ModuleType, servers: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(task: Task, planner: Any, solver: Any) -> None:
        raise RuntimeError("the solver is gone")

    monkeypatch.setattr(roll, "execute", execute)
    job = TrainJob(model="m", batch_size=2, num_repeat=2)
    for server in servers:
        server.script("/status", ServerStatus(engine=ROLLING, job=job).model_dump(mode="json"))
        server.script("/get_engine_status", ROLLING.model_dump(mode="json"))
    quick = RetryPolicy(attempts=1, base=0.001, total=5.0)
    arguments = argparse.Namespace(seed=1, shuffle_rewards=False)
    with (
        SwarmClient(servers[0].url, policy=quick) as planner,
        SwarmClient(servers[1].url, policy=quick) as solver,
        pytest.raises(SwarmGatewayError, match=r"groups in a row failed.*the solver is gone"),
    ):
        roll.learn((planner, solver), 1, arguments)


def took_steps(folder: Path, said: str) -> Curve:
    """What the readme's commands leave in any case: both models took two steps or more."""
    curve = Curve.model_validate_json((folder / "runs" / "quick" / "curve.json").read_text())
    first, last = curve.points
    assert first.step == 0 and last.step >= 2
    assert set(first.scores) == {"together", "planner", "solver"}
    assert "plan: " in said and "answer: " in said
    for name in ("planner", "solver"):
        assert (folder / "runs" / name / "journal.db").is_file()
    return curve


def check_readme(folder: Path, said: str) -> None:
    """What the commands of its readme leave; see ``test_readmes.py``."""
    before, after = took_steps(folder, said).points
    assert after.scores["planner"].mean > before.scores["planner"].mean
    assert after.scores["solver"].mean > before.scores["solver"].mean


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs the cpu extra")
def test_two_real_engines_train_side_by_side(tmp_path: Path) -> None:
    """The tiny model on two swarm servers: two of Ray, vLLM and verl at once, one `up`, one gateway."""

    def tiny(folder: Path) -> None:
        model = tiny_model.build(tmp_path / "tiny")
        file = folder / "up.yaml"
        text = file.read_text().replace("model: smollm2-135m", f"model: {model}")
        # its tokens are bytes
        file.write_text(text.replace("max_prompt_length: 512", "max_prompt_length: 1024"))

    took_steps(*follow("two_models", tmp_path, tiny))
