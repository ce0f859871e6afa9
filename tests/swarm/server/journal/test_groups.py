from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from reward_hooks.recorded import RecordedGroup, read_groups
from swarm.errors import ConfigError
from swarm.server.episodes.timelines import merge_calls
from swarm.server.journal.export import ExportReport, ExportState, export, model_of
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import CallRow, JournalRow, RunRow
from swarm.tokens import Trajectory
from swarm.types import Notes, WorkflowOutput
from tests.swarm.server.journal.build import claimed, ended, over
from tests.token_data import model_call

JOB = "model: tiny\n"


def decode(ids: list[int], *, special: bool) -> str:
    """Token 0 is special."""
    return " ".join(f"<{one}>" if one == 0 else f"t{one}" for one in ids if special or one)


def episode(
    name: str, tokens: Sequence[int], task_id: str = "t", reward: float = 1.0, **notes: Any
) -> tuple[JournalRow, ...]:
    """One answer of so many tokens, as the data plane and its client record it."""
    call = model_call([0, 9], tokens, 3, 4, call_id=name, finish_reason="length")
    timelines = merge_calls([call])
    trajectory = Trajectory(episode_uuid=name, task_id=task_id, reward=reward, timelines=timelines, num_calls=1)
    output = WorkflowOutput(reward=reward, notes=Notes(**notes))
    return (
        claimed(name),
        CallRow(name, call),
        ended(name, task_id, trajectory=trajectory, output=output, kept_call=name),
    )


def groups(folder: Path, *rows: JournalRow, state: ExportState = "waiting") -> tuple[ExportReport, list[RecordedGroup]]:
    async def fill() -> None:
        journal = Journal.open(folder / "journal.db")
        journal.append(RunRow("r", JOB), *rows)
        await journal.close()

    asyncio.run(fill())
    report = export(folder / "journal.db", folder / "x.jsonl", state, decode=decode)
    return report, list(read_groups(folder / "x.jsonl"))


def test_a_group_of_the_gateways_is_in_words_with_its_task_and_its_order(tmp_path: Path) -> None:
    task = {"main_query": "why?", "metadata": {"answer": "42"}}
    # the rewards are those of a control: the rank is what the hook said
    report, [group] = groups(
        tmp_path,
        *episode("a", [1, 0], reward=5.0, group_id="g", rank=2, task=task),
        *episode("b", [1, 2, 3], reward=4.0, group_id="g", rank=1),
    )
    assert (report.rows, report.groups, report.left_out) == (2, 1, 0)
    assert (group.task.task_id, group.task.main_query, group.task.metadata) == ("t", "why?", {"answer": "42"})
    assert group.task.init_messages == [{"role": "user", "content": "<0> t9"}]
    assert group.rank == [2, 1]
    assert [one.text for one in group.candidates] == ["t1", "t1 t2 t3"]
    assert [one.message["content"] for one in group.candidates] == ["t1", "t1 t2 t3"]
    first = group.candidates[0]
    assert (first.finish_reason, first.prompt_tokens, first.completion_tokens) == ("length", 2, 2)
    assert first.policy_version == 4


def test_of_other_clients_a_task_is_a_group_and_its_rewards_the_order(tmp_path: Path) -> None:
    _, found = groups(
        tmp_path,
        *episode("a", [1], "one", 0.5),
        *episode("b", [2], "two", 0.5),
        *episode("c", [3], "one", 0.7),
        *episode("d", [4], "one", 0.5),
    )
    assert [(group.task.task_id, group.rank) for group in found] == [("one", [2, 1, 2]), ("two", [1])]
    assert found[0].task.main_query == "<0> t9"


def test_what_is_no_single_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    given_up = over("x", "aborted", drop_reason="no reward", notes=Notes(group_id="g1"))
    report, [group] = groups(
        tmp_path,
        *episode("a", [1], group_id="g1", rank=1),
        claimed("x"),
        given_up,
        *episode("b", [1], group_id="g2", rank=1),
        claimed("eval", episode_type="eval"),
        over("eval"),
        state="all",
    )
    assert (report.groups, report.left_out) == (1, 1)
    assert [one.text for one in group.candidates] == ["t1"]


def test_the_model_is_that_of_the_runs(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def fill() -> None:
        journal = Journal.open(path)
        journal.append(RunRow("r1", JOB), RunRow("r2", JOB), RunRow("r3", "model: other\n"), RunRow("r4", ""))
        await journal.close()

    asyncio.run(fill())
    assert [model_of(path, run) for run in ("r1", "r2", "r3")] == ["tiny", "tiny", "other"]
    with pytest.raises(ConfigError, match=r"are of other, tiny: name the model with --tokenizer"):
        model_of(path)
    with pytest.raises(ConfigError, match="name none"):
        model_of(path, "r4")
    with pytest.raises(ConfigError, match="there is no journal"):
        model_of(tmp_path / "none.db")
