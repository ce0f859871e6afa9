"""``train`` with the real swarm server and a scripted engine: steps, evaluations, the report, and how it ends."""

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gateway.cli.root import app
from gateway.cli.sections import read_train
from gateway.launch.plan import UpPlan
from gateway.launch.train import TrainCommand, TrainPlan, rehearsal
from gateway.launch.up import run_up
from gateway.launch.watch import UpFailedError
from swarm.client.training_options import EvaluationReport, Progress
from swarm.data import epochs_of
from swarm.errors import ConfigError
from swarm.job import TrainJob
from swarm.server.journal.lineage import record_of
from swarm.server.journal.schema import reading
from swarm.states import EngineState
from swarm.status import EngineStatus, PolicyRecord, ServerStatus
from swarm.types import EvalResult, StepResult
from tests.gateway.train_process import HELD, check_resume
from tests.processes import nothing_left_behind
from tests.standins.engine import FOLDER_VARIABLE
from tests.swarm.client.scripted import Answer, ScriptedServer
from tests.swarm.client.test_sync import claimed
from tests.swarm.client.test_training import at

ROOT = Path(__file__).parents[3]
#: The command line, whose servers are started with the stand-in engine.
WITH_STANDIN = """
from dataclasses import replace
from gateway.cli import main, sections
read = sections.read_train

def read_train(path):
    plan = read(path)
    command = (*plan.up.command[:-1], "tests.gateway.scripted_up", "paced")
    return replace(plan, up=replace(plan.up, command=command))

sections.read_train = read_train
main()
"""
COMMAND = UpPlan.__dataclass_fields__["command"].default[:-1]
WORKFLOW = """
from swarm.types import WorkflowOutput

def solve(task, client):
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": task.main_query}])
    text = answer.choices[0].message.content
    return WorkflowOutput(reward=len(text) % 7, is_success=len(text) % 2 == 0, log_metrics={"letters": len(text)})

async def broken(task):
    raise RuntimeError("the tool is missing")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TrainPlan]]:
    """The plan of a file, with changes to it."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    (tmp_path / "my_agent.py").write_text(WORKFLOW)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"question": "{n} + 1?"}}\n' for n in range(20)))
    (tmp_path / "val.jsonl").write_text("".join(f'{{"question": "{n} + 2?"}}\n' for n in range(3)))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    monkeypatch.setattr("gateway.launch.up._POLL", 0.05)
    sections: dict[str, Any] = {
        "job": {"model": "tiny", "batch_size": 2, "num_repeat": 2, "total_training_steps": 4, "max_staleness": 0},
        "workflow": "my_agent:solve",
        "tasks": {"train": "train.jsonl", "validation": "val.jsonl"},
        "eval": {"every_steps": 2, "samples": 2},
        "swarm": {"port": 0, "run_dir": "run"},
    }

    def plan(**changes: Any) -> TrainPlan:
        path = tmp_path / "train.yaml"
        path.write_text(yaml.safe_dump(sections | changes))
        made = read_train(path)
        command = (*COMMAND, "tests.gateway.scripted_up", "paced")
        return replace(made, up=replace(made.up, command=command))

    yield plan
    sys.modules.pop("my_agent", None)


class Run:
    """Runs a plan in this thread; ``on`` maps an event to what happens then."""

    def __init__(self, plan: TrainPlan, **on: Callable[[], None]) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.plan = plan
        self.on = on
        self.work = TrainCommand(plan, self.tell)

    def __call__(self) -> None:
        with nothing_left_behind():
            run_up(self.plan.up, self.tell, self.work)

    def tell(self, kind: str, values: dict[str, Any]) -> None:
        self.events.append((kind, values))
        if action := self.on.get(kind):
            action()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [values for one, values in self.events if one == kind]


@pytest.mark.slow
def test_it_trains_evaluates_around_the_steps_and_reports(file: Callable[..., TrainPlan]) -> None:
    run = Run(file())
    run()
    report = run.work.report
    assert report is not None and report.stopped_because == "all steps are done"
    assert [one["step"] for one in run.of("step")] == [1, 2, 3, 4] == [one.step for one in report.steps]
    assert [one["step"] for one in run.of("evaluating")] == [0, 2, 4]
    assert [one["step"] for one in run.of("evaluation")] == [0, 2, 4] == [one.step for one in report.evaluations]
    # of every validation task two episodes, and what the server counted is what the client saw
    assert [one.episodes for one in report.evaluations] == [6, 6, 6]
    for told, point in zip(run.of("evaluation"), report.evaluations, strict=True):
        assert (told["finished"], told["failed"]) == (6, 0)
        assert told["mean_reward"] == pytest.approx(point.reward_mean)
        assert told["success_rate"] == pytest.approx(point.success_rate)
    assert all(one.calls == 1.0 and one.logged["letters"] > 0 for one in (*report.steps, *report.evaluations))
    # nothing of another step comes between a step and its evaluation
    order = [(kind, values["step"]) for kind, values in run.events if kind in ("step", "evaluation")]
    assert order.index(("evaluation", 2)) < order.index(("step", 3))
    assert run.of("stopping") == [{"name": "engine"}, {"name": "swarm server"}], "there is no gateway"


@pytest.mark.slow
def test_one_ctrl_c_ends_it_with_a_report_of_what_there_is(file: Callable[..., TrainPlan]) -> None:
    run = Run(file(control="shuffle"), evaluation=lambda: os.kill(os.getpid(), signal.SIGINT))
    run()
    report = run.work.report
    assert report is not None and report.interrupted and report.control == "shuffle"
    assert [one.step for one in report.evaluations] == [0]


def test_an_evaluation_that_was_interrupted_is_in_no_report(file: Callable[..., TrainPlan]) -> None:
    command = TrainCommand(file(), lambda kind, values: None)
    progress = Progress(4, 0, 8, finished=16, failed=0, mean_reward=0.5, evaluating=True)
    evaluations = [EvalResult(step=step, episodes=2, metrics={"eval/reward_mean": 0.5}) for step in (0, 4)]
    engine = EngineStatus(engine_status=EngineState.ROLLING)
    status = ServerStatus(engine=engine, evaluations=evaluations)
    options = command._options()
    assert options.evaluation is not None
    options.on_progress(progress)
    assert [point.step for point in command._reported(status, 1.0, "interrupted").evaluations] == [0]
    options.evaluation.on_done(EvaluationReport(step=4, finished=2, failed=0, mean_reward=0.5, success_rate=None))
    assert [point.step for point in command._reported(status, 1.0, "interrupted").evaluations] == [0, 4]


@pytest.mark.slow
def test_an_interrupted_run_goes_on_behind_its_checkpoint(file: Callable[..., TrainPlan], tmp_path: Path) -> None:
    job = {"model": "tiny", "batch_size": 2, "num_repeat": 2, "total_training_steps": 3, "max_staleness": 0}
    (tmp_path / "my_agent.py").write_text(WORKFLOW + HELD)
    # the workflows that block hold up the first step for no longer than this
    swarm = {"port": 0, "run_dir": "run", "post_rolling_timeout": 0.5}
    file(job={**job, "save_freq": 1}, swarm=swarm, workflow="my_agent:held", eval=None)
    check_resume([sys.executable, "-c", WITH_STANDIN, "train", "train.yaml", "--json"], tmp_path, "train.jsonl", 180)


def test_a_run_with_another_batch_size_goes_on_where_its_tasks_were(
    file: Callable[..., TrainPlan], tmp_path: Path
) -> None:
    (tmp_path / "my_agent.py").write_text(WORKFLOW + "\ndef right(task):\n    return {'reward': 1.0}\n")
    plan = file(workflow="my_agent:right", eval=None)
    # the agent may end many before the status is read, and none of them is to be of another epoch
    (tmp_path / "train.jsonl").write_text("".join(f'{{"question": "{n} + 1?"}}\n' for n in range(2000)))
    tasks = [task.task_id for task in itertools.islice(epochs_of(tmp_path / "train.jsonl", 0), 15)]

    def record(job: TrainJob, *tasks: int, first: int = 1) -> dict[str, Any]:
        steps = [
            StepResult(step=number, batch_id="b", metrics={"swarm/tasks": count}, seconds=1.0)
            for number, count in enumerate(tasks, first)
        ]
        fields: dict[str, Any] = {
            "step": first,
            "job": job,
            "steps": steps,
            "evaluations": [],
            "routes": {},
            "code": [],
        }
        return PolicyRecord(**fields, episodes=None, verdicts=[], moves=[]).model_dump(mode="json")

    trainer, trained = TrainCommand(plan, lambda kind, values: None), threading.Event()
    with ScriptedServer() as server:

        def step() -> None:
            while not server.bodies("/end_episode"):
                threading.Event().wait(0.002)
            trained.set()

        server.script("/status", *[at(3)] * 3, Answer(at(100, 2), wait=trained))
        server.script("/policies/kept/3", record(plan.server.job, 2, first=3))
        server.script("/policies/kept/2", record(plan.server.job.model_copy(update={"batch_size": 6}), 6, 6))
        server.script("/claim_episode", claimed())
        server.script("/end_episode", {"success": True})
        stepping = threading.Thread(target=step)
        stepping.start()
        trainer(server.url, "", threading.Event())
        stepping.join()
        ended = [body["task_id"] for body in server.bodies("/end_episode")]
    assert [task in ended for task in tasks] == [False] * 14 + [True]


@pytest.mark.slow
def test_a_workflow_that_always_fails_ends_it_with_its_own_words(file: Callable[..., TrainPlan]) -> None:
    run = Run(file(workflow="my_agent:broken", eval=None))
    with pytest.raises(UpFailedError, match="all 4 episodes failed, the first with: the tool is missing") as caught:
        run()
    assert any("raise RuntimeError" in line for line in caught.value.last_lines)


def test_a_server_that_is_gone_hides_no_error(file: Callable[..., TrainPlan]) -> None:
    trainer = TrainCommand(file(workflow="my_agent:broken", eval=None), lambda kind, values: None)
    gone = Answer({"error": {"message": "no more"}}, 404)
    with ScriptedServer() as server:
        # asked by the trainer, by its training, and by the one that watches
        server.script("/status", *[at(3)] * 3, gone)
        server.script("/claim_episode", claimed())
        server.script("/abort_episode", {"success": True})
        with pytest.raises(UpFailedError, match="episodes failed, the first with: the tool is missing"):
            trainer(server.url, "", threading.Event())
    report = trainer.report
    assert report is not None and report.failed >= 4 and "episodes failed" in report.stopped_because


def test_tasks_that_break_in_the_middle_leave_a_report_and_say_why(
    file: Callable[..., TrainPlan], tmp_path: Path
) -> None:
    broken = "\ndef tasks():\n    yield {'question': '1 + 1?'}\n    yield {'question': str({}['column'])}\n"
    (tmp_path / "my_agent.py").write_text(WORKFLOW + "\ndef right(task):\n    return {'reward': 1.0}\n" + broken)
    plan = file(workflow="my_agent:right", tasks={"train": "my_agent:tasks"}, eval=None)
    trainer = TrainCommand(plan, lambda kind, values: None)
    with ScriptedServer() as server:
        server.script("/status", at(3))
        server.script("/claim_episode", claimed())
        for path in ("/end_episode", "/abort_episode"):
            server.script(path, {"success": True})
        with pytest.raises(UpFailedError, match="KeyError: 'column'") as caught:
            trainer(server.url, "", threading.Event())
    assert any("{}['column']" in line for line in caught.value.last_lines)
    report = trainer.report
    assert report is not None and not report.interrupted and report.stopped_because == "KeyError: 'column'"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": {"train": "none.jsonl"}, "eval": None}, "there is no file .*none.jsonl"),
        ({"tasks": {"train": "train.jsonl"}}, "eval needs tasks.validation"),
        ({"workflow": "my_agent:nothing"}, "has no attribute 'nothing'"),
        ({"job": {"model": "tiny", "collection": "any_client_agree_sync_weight"}}, "every batch would wait"),
        ({"workflw": "x"}, r"unknown key 'workflw' \(did you mean 'workflow'\?\)"),
        ({"job": {"model": "tiny", "batchsize": 1}}, r"did you mean 'batch_size'"),
        ({"job": {"model": "tiny", "learning_rate": 1}}, r"unknown key 'learning_rate' \(did you mean 'lr'\?\)"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    file: Callable[..., TrainPlan], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        file(**changes)


def test_a_rehearsal_takes_two_steps_and_evaluates_on_few_tasks(file: Callable[..., TrainPlan]) -> None:
    whole = file()
    plan = rehearsal(whole)
    # whoever resumes the run never goes on from its rehearsal
    assert plan.server.run_dir == whole.server.run_dir / "quick" == Path(plan.server.swarm_section["run_dir"])
    assert plan.server.job.save_freq == -1
    # nor are checkpoints that are elsewhere set aside, as at the start of each run that does not go on from them
    assert rehearsal(file(job=JOB | {"checkpoint_dir": "kept"})).server.job.checkpoint_dir is None
    assert (plan.server.job.total_training_steps, plan.server.job.serve_after_training) == (2, True)
    assert plan.file.eval is not None
    assert (plan.file.eval.every_steps, plan.file.eval.samples, plan.file.eval.tasks) == (2, 1, 4)
    assert rehearsal(file(eval=None)).file.eval is None


JOB = {"model": "tiny", "batch_size": 2, "num_repeat": 2, "total_training_steps": 2, "max_staleness": 0, "save_freq": 1}
#: More steps than such a run can do before Ctrl-C reaches it.
ENDLESS = JOB | {"total_training_steps": 10_000}


def interrupted(file: Callable[..., TrainPlan]) -> None:
    """A run of :data:`ENDLESS` that Ctrl-C ends at its first step, or a few later: the stand-in is fast."""
    run = Run(file(job=ENDLESS, eval=None), step=lambda: os.kill(os.getpid(), signal.SIGINT))
    run()
    assert run.of("step")


@pytest.mark.slow
def test_the_same_command_goes_on_from_the_last_saved_step(file: Callable[..., TrainPlan]) -> None:
    interrupted(file)
    run = Run(file(job=ENDLESS, eval=None), step=lambda: os.kill(os.getpid(), signal.SIGINT))
    run()
    [going_on] = run.of("going_on")
    assert going_on["saved"] >= 1 and run.of("step")[0]["step"] == going_on["saved"] + 1


@pytest.mark.slow
def test_a_changed_job_is_refused_and_goes_on_if_that_is_said(file: Callable[..., TrainPlan]) -> None:
    interrupted(file)
    changed = file(job=ENDLESS | {"total_training_steps": 10_001, "lr": 1e-5}, eval=None)
    refused = Run(changed)
    with pytest.raises(ConfigError, match=r"differs in lr, total_training_steps: --resume goes on .*--fresh begins"):
        refused()
    assert not refused.of("starting"), "no engine was started"
    run = Run(
        replace(changed, up=replace(changed.up, earlier_run="resume")), step=lambda: os.kill(os.getpid(), signal.SIGINT)
    )
    run()
    assert run.of("step")[0]["step"] == run.of("going_on")[0]["saved"] + 1


@pytest.mark.slow
def test_going_back_keeps_what_came_after_and_goes_on_from_there(
    file: Callable[..., TrainPlan], tmp_path: Path
) -> None:
    plan = file(job=ENDLESS, eval=None)
    counted: list[int] = []

    def until(count: int) -> Callable[[], None]:
        def step() -> None:
            counted.append(1)
            if len(counted) >= count:
                os.kill(os.getpid(), signal.SIGINT)

        return step

    Run(plan, step=until(3))()
    with pytest.raises(ConfigError, match=r"step 77 is not kept in .*; kept are "):
        Run(replace(plan, up=replace(plan.up, from_step=77)))()
    counted.clear()
    run = Run(replace(plan, up=replace(plan.up, from_step=1)), step=until(1))
    run()
    [back] = run.of("rolled_back")
    assert back["saved"] == 1 and back["step"] >= 3 and not run.of("going_on")
    assert run.of("step")[0]["step"] == 2
    checkpoints = tmp_path / "run" / "checkpoints"
    assert back["kept"] == str(checkpoints / "earlier-1")
    assert (checkpoints / "earlier-1" / "global_step_3").is_dir()
    # the run that went back has the first step of the other one, and none of its later ones
    journal = tmp_path / "run" / "journal.db"
    assert [one.step for one in record_of(journal, 2).steps] == [1, 2]
    with reading(journal) as connection:
        runs = connection.execute("SELECT count(DISTINCT run_id), sum(step = 1), sum(step = 3) FROM steps").fetchall()
    # it may have done a third step of its own before it stopped
    assert runs in ([(2, 2, 1)], [(2, 2, 2)])


@pytest.mark.slow
def test_a_fork_trains_on_from_its_step_in_a_folder_of_its_own(file: Callable[..., TrainPlan], tmp_path: Path) -> None:
    interrupted(file)
    told = ["policies", "fork", "1", "--run-dir", str(tmp_path / "run"), "--out", str(tmp_path / "fork")]
    forked = CliRunner().invoke(app, told)
    assert forked.exit_code == 0, (forked.output, forked.exception)
    before = sorted((tmp_path / "run" / "checkpoints").rglob("*"))
    plan = file(job=ENDLESS, eval=None, swarm={"port": 0, "run_dir": "fork"})
    run = Run(plan, step=lambda: os.kill(os.getpid(), signal.SIGINT))
    run()
    [going_on] = run.of("going_on")
    assert (going_on["saved"], run.of("step")[0]["step"]) == (1, 2)
    assert sorted((tmp_path / "run" / "checkpoints").rglob("*")) == before
    found = record_of(tmp_path / "fork" / "journal.db", 2)
    assert found.parent == f"step 1 of run {record_of(tmp_path / 'run' / 'journal.db', 1).run_id}"


@pytest.mark.slow
def test_another_model_never_goes_on_from_a_checkpoint(file: Callable[..., TrainPlan], tmp_path: Path) -> None:
    interrupted(file)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    other = file(job=ENDLESS | {"model": "other"}, eval=None)
    with pytest.raises(ConfigError, match="its weights would replace those of the job's model, 'other'"):
        Run(replace(other, up=replace(other.up, earlier_run="resume")))()


@pytest.mark.slow
def test_a_finished_run_is_kept_beside_a_fresh_one(file: Callable[..., TrainPlan], tmp_path: Path) -> None:
    Run(file(job=JOB, eval=None))()
    again = file(job=JOB, eval=None)
    with pytest.raises(ConfigError, match="its last checkpoint is of step 2, and total_training_steps is 2: raise it"):
        Run(again)()
    run = Run(replace(again, up=replace(again.up, earlier_run="fresh")))
    run()
    assert run.of("set_aside") == [{"run_dir": str(tmp_path / "run"), "kept": str(tmp_path / "run-1")}]
    assert [one["step"] for one in run.of("step")] == [1, 2] and not run.of("going_on")
    assert (tmp_path / "run-1" / "checkpoints" / "global_step_2").is_dir()
    assert (tmp_path / "run" / "logs" / "swarm.log").exists() and (tmp_path / "run-1" / "logs" / "swarm.log").exists()


@pytest.mark.slow
def test_steps_that_no_checkpoint_holds_are_told_at_the_end(file: Callable[..., TrainPlan]) -> None:
    run = Run(file(job={**JOB, "save_freq": 100, "total_training_steps": 1}, eval=None))
    run()
    assert run.of("unsaved") == [{"step": 1, "saved": 0}]


@pytest.mark.slow
def test_a_rehearsal_from_which_no_start_goes_on_warns_of_no_lost_steps(file: Callable[..., TrainPlan]) -> None:
    run = Run(rehearsal(file(job=JOB, eval=None)))
    run()
    assert run.of("step") and not run.of("unsaved")
