"""``policies show``, ``export``, ``fork`` and ``delete`` in a run folder."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.root import app
from gateway.keys.store import KeyFile
from gateway.launch.plan import ServerPlan
from gateway.launch.servers import check_earlier
from swarm.checkpoints import LATEST, hold, kept_steps, saved_step
from swarm.errors import ConfigError
from swarm.evidence.stages import ServingStage, StageRules
from swarm.job import TrainJob, dump_job
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.journal.browse import last_run
from swarm.server.journal.erasure import EXPORTS
from swarm.server.journal.journal import Journal
from swarm.server.journal.lineage import keep_comparison
from swarm.server.journal.rows import EvaluationRow, JournalRow, PairRow, RunRow, StageRow, StateRow, StepRow
from swarm.states import EpisodeState
from swarm.types import Notes, StepResult, WorkflowOutput
from tests.disks import fill, small_disk
from tests.gateway.cli.test_models import journal, saved, steps
from tests.gateway.conftest import gateway_before
from tests.standins import engine
from tests.standins.vllm import listening
from tests.swarm.server.episodes.test_comparisons import pair
from tests.swarm.server.journal.build import claimed, ended

JOB = TrainJob(model="tiny", lr=0.5)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["policies", *arguments])


def answer(*arguments: str) -> Any:
    result = command(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Steps 1, 2 and 3 are done and kept: 1 is promoted, 2 the best, 3 the last."""
    folder = tmp_path / "run"
    rules = StageRules()
    first = ServingStage.begun("chat", "gpt", rules, 1.0, "salt").serving(1, 1.0)
    promoted = first.moved(0.05, 2.0, "ann", "read 50 of both")
    rows: list[JournalRow] = [
        StageRow("r", "chat", "gpt", stage.version, stage.model_dump_json()) for stage in (first, promoted)
    ]
    pairs = [pair(f"g{number}", challenger=1, stage="shadow") for number in range(3)]
    rows += [PairRow("r", one.group_id, one.terms.digest, one.model_dump_json()) for one in pairs]
    rows += [EvaluationRow("r", 1, {"reward_mean": (4, 3.0)})]
    output = WorkflowOutput(reward=1.0, notes=Notes(hook="rubric", code="c0de" * 16))
    rows += [claimed("e1"), ended("e1", output=output), StateRow(["e1"], EpisodeState.TRAINED, "r1", 1)]
    journal(folder, JOB, *steps("r", 1, 2, 3), *rows)
    saved(folder, _1=0.1, _2=0.9, _3=0.2)
    checkpoints = folder / "checkpoints"
    (checkpoints / LATEST).write_text("3")
    hold(checkpoints, {1: "promoted on chat"})
    return folder


def test_a_kept_version_says_what_made_it_and_who_promoted_it(run_dir: Path) -> None:
    told = ("--run-dir", str(run_dir))
    assert [(row["step"], row["why"]) for row in answer("show", *told)] == [
        (1, ["promoted on chat"]),
        (2, ["the best"]),
        (3, ["the run goes on from it"]),
    ]
    assert "step 2, reward 0.900, 0 MB: the best" in command("show", *told).stdout
    shown = answer("show", "1", *told)
    assert shown["code"] == ["rubric (c0dec0dec0de)"] and shown["episodes"][0] == shown["episodes"][1]
    assert shown["job"] == {"model": "tiny", "lr": 0.5} and shown["run_id"] == "r"
    lines = command("show", "1", *told).stdout.splitlines()
    assert lines[0] == "tiny, step 1 of run r" and "parent: the model tiny" in lines
    assert "evaluation: eval/reward_mean 0.75" in lines
    [verdict] = [line for line in lines if line.startswith("verdict: ")]
    assert verdict.startswith("verdict: shadow, against ") and "in 3 requests" in verdict
    assert any("chat: canary 0.05 since" in line and "by ann: read 50 of both" in line for line in lines)
    assert "parent: step 2 of this run" in command("show", "3", *told).stdout
    assert "step 4 is not kept" in str(command("show", "4", *told).exception)
    assert "exists: name a folder that does not" in str(
        command("export", "2", *told, "--out", str(run_dir)).exception
    ), "`models export` does it"


def test_after_a_step_back_a_number_stands_for_the_weights_that_have_it_now(run_dir: Path) -> None:
    rules = StageRules()
    before = ServingStage.begun("chat", "gpt", rules, 3.0, "salt").serving(2, 3.0)
    rows: list[JournalRow] = [StageRow("r", "chat", "gpt", 9, before.moved(1.0, 4.0, "bob", "good").model_dump_json())]
    rows += [PairRow("r", "other", "t", pair("other", challenger=2).model_dump_json())]
    # back to step 1, and step 2 is trained anew
    rows += [RunRow("again", dump_job(JOB))]
    rows += [
        StepRow("again", StepResult(step=step, batch_id=batch, metrics={}, seconds=1.0))
        for step, batch in ((1, "r1"), (2, "new"))
    ]
    for step, batch in ((1, "r1"), (2, "r2"), (2, "new")):
        keep_comparison(
            run_dir, step, batch=batch, earlier="the model before", data="d", hook="h", verdict=f"of {batch}"
        )

    async def fill() -> None:
        opened = Journal.open(run_dir / "journal.db")
        opened.append(*rows)
        await opened.close()

    asyncio.run(fill())
    told = ("--run-dir", str(run_dir))
    shown = answer("show", "2", *told)
    assert (shown["run_id"], shown["moves"], shown["verdicts"]) == ("again", [], [])
    assert [sentence.rpartition(": ")[2] for sentence in shown["held_out"]] == ["of new"]
    # of the step that the run went back to, all stays known
    shown = answer("show", "1", *told)
    assert any("by ann: read 50 of both" in move for move in shown["moves"]) and len(shown["verdicts"]) == 1
    assert [sentence.rpartition(": ")[2] for sentence in shown["held_out"]] == ["of r1"]


def test_a_fork_goes_on_from_a_kept_version_in_a_folder_of_its_own(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "fork"
    told = ("--run-dir", str(run_dir), "--out", str(out))
    assert "kept are 1, 2, 3" in str(command("fork", "7", *told).exception) and not out.exists()
    assert answer("fork", "2", *told) == {"run_dir": str(out), "step": 2, "from": str(run_dir)}
    assert saved_step(JOB, out) == 2 and kept_steps(out / "checkpoints") == [2]
    shards = [folder / "checkpoints/global_step_2/score.json" for folder in (run_dir, out)]
    assert shards[0].samefile(shards[1]), "weights take no room twice"
    # `up` goes on with it, and refuses another job as for any run
    job, done = last_run(out / "journal.db")
    assert job == JOB and done == 0
    check_earlier(ServerPlan(JOB, {}, out), job, 2, 2, changes_allowed=False)
    assert answer("show", "2", "--run-dir", str(out))["run_id"] == "r"
    noted = [json.loads(line)["what"] for line in (run_dir / EXPORTS).read_text().splitlines()]
    assert noted == [f"the run folder {out}"], "`data report` names it"
    assert "exists" in str(command("fork", "2", *told).exception) and list(tmp_path.glob(".fork*")) == []


def test_a_fork_that_a_full_disk_stops_is_told_in_one_sentence_and_leaves_nothing(
    run_dir: Path, tmp_path: Path
) -> None:
    (run_dir / "checkpoints/global_step_2/weights").write_bytes(b"w" * 40_000)
    with small_disk(tmp_path / "disk", 2) as disk:
        size = (ballast := fill(disk)).stat().st_size
        told: list[str] = []
        for room in range(0, size, 8192):
            os.truncate(ballast, size - room)
            if not (result := command("fork", "2", "--run-dir", str(run_dir), "--out", str(disk / "fork"))).exit_code:
                break
            assert isinstance(result.exception, ConfigError), result.exception
            told.append(result.exception.message)
            assert list(disk.iterdir()) == [ballast]
        assert kept_steps(disk / "fork/checkpoints") == [2]
    assert all(len(message.splitlines()) == 1 and "[(" not in message for message in told)
    assert any("cannot make the run folder" in message and "No space left on device" in message for message in told)
    assert any("cannot write" in message and "disk is full" in message for message in told)


def test_a_fork_is_named_as_any_file_may_name_it(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = command("fork", "2", "--run-dir", str(run_dir), "--out", "mine").stdout
    # relative, it would start from the file, and begin there anew
    assert f"`swarm: {{run_dir: {tmp_path / 'mine'}}}`" in told


def test_a_version_is_deleted_unless_it_is_served_or_held(run_dir: Path) -> None:
    told = ("--run-dir", str(run_dir))
    told = (*told, "--reason", "no room")
    assert "goes on from step 3" in str(command("delete", "3", *told, "--yes").exception)
    assert "step 1 is promoted on chat: `policies rollback`" in str(command("delete", "1", *told, "--yes").exception)
    refused = command("delete", "2", *told)
    assert "nothing is deleted: add --yes to remove" in str(refused.exception)
    assert kept_steps(run_dir / "checkpoints") == [1, 2, 3] and not (run_dir / "audit.jsonl").exists()
    assert answer("delete", "2", *told, "--yes")["step"] == 2
    assert kept_steps(run_dir / "checkpoints") == [1, 3]
    [entry] = [json.loads(line) for line in (run_dir / "audit.jsonl").read_text().splitlines()]
    assert (entry["what"], entry["details"]["step"], entry["result"]) == ("policies delete", 2, "done")
    assert entry["details"]["reason"] == "no room"
    assert "not kept: its checkpoint is removed" in command("show", "2", "--run-dir", str(run_dir)).stdout


@pytest.mark.anyio
async def test_a_server_and_a_gateway_before_it_show_and_delete_versions_as_the_folder_does(
    run_dir: Path, tmp_path: Path
) -> None:
    here = await asyncio.to_thread(answer, "show", "2", "--run-dir", str(run_dir))
    server = create_app(ServerConfig(run_dir=run_dir, token="secret"), engine_command=engine.command("train"))
    _, key = KeyFile(tmp_path / "keys.json").create("ann", admin=True)
    settings: dict[str, Any] = {"swarm_token": "secret", "keys_file": tmp_path / "keys.json"}
    async with listening(server) as url, gateway_before(url, tmp_path, **settings) as http:
        swarm = ("--swarm-url", url, "--token", "secret")
        through = ("--gateway-url", str(http.base_url), "--api-key", key)
        for address in (swarm, through):
            assert [row["step"] for row in await asyncio.to_thread(answer, "show", *address)] == [1, 2, 3]
            assert await asyncio.to_thread(answer, "show", "2", *address) == here
        for wrong, status, says in (
            ({"step": 1, "reason": "x"}, 409, "step 1 is promoted on chat"),
            ({"step": 3, "reason": "x"}, 409, "goes on from step 3"),
            ({"step": 7, "reason": "x"}, 404, "kept are 1, 2, 3"),
            ({"step": 2, "reason": ""}, 400, "reason"),
        ):
            refused = await http.post("/admin/policies/delete", json=wrong, headers={"authorization": f"Bearer {key}"})
            assert refused.status_code == status and says in refused.json()["error"]["message"], refused.text
        for step in ("x", "4"):
            lost = await http.get(f"/admin/policies/kept/{step}", headers={"authorization": f"Bearer {key}"})
            assert lost.status_code == 404
        both = await asyncio.to_thread(command, "show", *swarm, "--run-dir", str(run_dir))
        assert "not both" in str(both.exception)
        gone = await asyncio.to_thread(answer, "delete", "2", *through, "--yes", "--reason", "no room")
        assert gone["step"] == 2 and kept_steps(run_dir / "checkpoints") == [1, 3]
    log = [json.loads(line) for line in (run_dir / "audit.jsonl").read_text().splitlines()]
    assert [entry["result"].partition(":")[0] for entry in log] == ["refused", "refused", "refused", "done"]
    assert log[-1]["details"] == {"reason": "no room", **gone} and log[-1]["sender"].startswith("gateway key ann for ")


def test_a_folder_whose_run_is_open_is_read_all_the_same(run_dir: Path, tmp_path: Path) -> None:
    async def meanwhile() -> Any:
        opened = Journal.open(run_dir / "journal.db")
        try:
            return await asyncio.to_thread(answer, "fork", "1", "--run-dir", str(run_dir), "--out", str(tmp_path / "x"))
        finally:
            await opened.close()

    assert asyncio.run(meanwhile())["step"] == 1
