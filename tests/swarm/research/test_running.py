"""The runner: proposals that are refused, attempts that fail, servers that are gone, and stops."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli.research import app
from swarm.errors import ConfigError
from swarm.job import TrainJob
from swarm.research import trees
from swarm.research.decisions import RunEnding
from swarm.research.lab import Lab, Order, RunFailedError, ServerGoneError, project_of
from swarm.research.ledger import BASE, Ledger, Run, State, read
from swarm.research.proposing import ProposerError
from swarm.research.report import markdown, summary
from swarm.research.running import Runner, StudyStoppedError, begin
from swarm.research.study import Study, read_study, rehearsal
from tests.swarm.client.scripted import ScriptedServer
from tests.swarm.client.test_training import at
from tests.swarm.research.making import ScriptedLab, folder_of, study_of, told
from tests.swarm.research.test_code import WEIGHT

GRID = {"kind": "grid", "space": {"lr": [3e-5]}}
PROPOSER = f"""
PATCH = {WEIGHT!r}

def propose(state):
    tries = [
        {{"hypothesis": "too much", "set": {{"lr": -1}}}},
        {{"hypothesis": "cheat | here", "patch": PATCH.replace("agent.py", "evaluate.py")}},
        {{"hypothesis": "a patch", "patch": PATCH, "set": {{"lr": 3e-5}}}},
    ]
    n = len(state["experiments"])
    return tries[n] if n < len(tries) else None
"""


class Around(ScriptedLab):
    """A scripted lab with something before each run."""

    def __init__(self, study: Study, log: Path, before: Callable[[str, Order], RunEnding | None]) -> None:
        super().__init__(study, log)
        self._before = before

    def run(self, server: str, order: Order, stopping: threading.Event) -> RunEnding | None:
        return self._before(server, order) or super().run(server, order, stopping)


def nothing(server: str, order: Order) -> None:
    return None


def done(
    folder: Path, before: Callable[[str, Order], RunEnding | None] = nothing, stopping: threading.Event | None = None
) -> State:
    """The state after the study was run as far as it goes."""
    study = read_study(folder)
    (folder / "runs").mkdir(exist_ok=True)
    lab: Lab = Around(study, folder / "runs" / "engines.jsonl", before)
    with Ledger(folder) as ledger:
        if not ledger.state.study:
            begin(study, folder, ledger)
        Runner(study, folder, ledger, lab, lambda kind, values: None).run(stopping or threading.Event())
        return ledger.state


def test_refused_proposals_stand_in_the_report(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "study", proposer={"kind": "function", "function": "mine:propose"})
    (folder / "mine.py").write_text(PROPOSER)
    codes: dict[str, str] = {}

    def before(server: str, order: Order) -> None:
        codes[order.run.name] = (order.tree.folder / "agent.py").read_text()

    state = done(folder, before)
    assert [one.verdict for one in state.experiments.values()] == ["dropped", "dropped", "kept"]
    assert "lr" in state.experiments["e1"].refused and "evaluate.py" in state.experiments["e2"].refused
    assert "WEIGHT = 2" in codes["e3"] and "WEIGHT = 2" in codes["e3.control1"] and "WEIGHT = 1" in codes["base.seed1"]
    text = markdown(read_study(folder), state, "report.png")
    assert "**e3 beats the base job (lr=3e-05, a patch): 3 seeds: gain" in text
    assert "| refused: job: lr: " in text
    assert "+WEIGHT = 2" in text and "| e3, shuffled rewards |" in text and "![scores" in text
    assert summary(read_study(folder), state)["kept"] == ["e3"]
    # another begin is refused, and going on does nothing
    with Ledger(folder) as ledger, pytest.raises(ConfigError, match="has begun"):
        begin(read_study(folder), folder, ledger)
    assert done(folder) == state


def test_a_report_says_the_confidence_that_was_declared() -> None:
    for confidence, said in ((0.95, "95%"), (0.975, "97.5%"), (0.999, "99.9%")):
        assert f"the {said} Welch" in markdown(study_of(decision={"confidence": confidence}), State())


def test_a_study_that_trains_on_what_it_is_measured_with_does_not_begin(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "study")
    (folder / "train.jsonl").write_text('{"question": "another"}\n{"id": "mine", "question": "held_out 3"}\n')
    with Ledger(folder) as ledger, pytest.raises(ConfigError, match=r"train\.jsonl: its task 'mine' is the held-out"):
        begin(read_study(folder), folder, ledger)
    assert not (folder / "ledger.jsonl").read_text()


def test_a_proposal_knows_what_was_measured_before_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "study")
    done(folder)
    events = told(folder / "ledger.jsonl")
    proposed = [at for at, event in enumerate(events) if event["event"] == "proposed"]
    ended = [at for at, event in enumerate(events) if event["event"] == "ended"]
    assert len(proposed) == 12
    assert all(before < after for before, after in zip(ended, proposed, strict=False)), "the base, e1, e2, ..."


def test_a_proposer_that_fails_is_asked_again_three_times_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.research.running.PAUSES", (0.0, 0.0))
    folder = folder_of(tmp_path / "study", proposer={"kind": "function", "function": "mine:propose"})
    asked = (
        "from pathlib import Path\n"
        "def propose(state):\n"
        "    with Path(__file__).with_name('runs').joinpath('asked').open('a+') as file:\n"
        "        file.write('x')\n"
        "        file.seek(0)\n"
        "        tries = len(file.read())\n"
    )
    (folder / "mine.py").write_text(asked + "    return None if tries == 3 else {'sett': {}}\n")
    assert done(folder).finished is not None
    assert (folder / "runs" / "asked").read_text() == "xxx"
    folder = folder_of(tmp_path / "another", proposer={"kind": "function", "function": "mine:propose"})
    (folder / "mine.py").write_text(asked + "    return {'sett': {}}\n")
    with pytest.raises(ProposerError, match="sett"):
        done(folder)
    assert (folder / "runs" / "asked").read_text() == "xxx"


def test_what_a_run_is_measured_with_is_not_there_to_train_on(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def before(server: str, order: Order) -> None:
        seen.append({path.name for path in order.tree.folder.iterdir()})

    folder = folder_of(tmp_path / "study", proposer=GRID)
    done(folder, before)
    assert seen and all("train.jsonl" in names and "held_out.jsonl" not in names for names in seen)
    assert (folder / "held_out.jsonl").exists()


def test_an_attempt_that_fails_is_made_once_more_with_another_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "study", proposer=GRID)

    def before(server: str, order: Order) -> None:
        if order.name == "e1.1" or order.run.name == "e1.seed2":
            raise RunFailedError("the engine died")

    state = done(folder, before)
    assert state.runs["e1"].attempt == 2 and state.runs["e1"].outcome == "done"
    assert state.experiments["e1"].verdict == "dropped"
    assert state.experiments["e1"].why == "run e1.seed2 failed: the engine died"
    starts = [one["start"] for one in told(folder / "runs" / "engines.jsonl") if "start" in one]
    assert "e1.2" in starts and len(starts) == len(set(starts))


def test_the_steps_of_failed_attempts_are_counted(tmp_path: Path) -> None:
    folder, stopping = folder_of(tmp_path / "study", proposer=GRID), threading.Event()

    def before(server: str, order: Order) -> None:
        if order.name == "base.1":
            order.on_step(3)
            raise RunFailedError("the engine died")
        if order.name == "e1.1" and not stopping.is_set():
            stopping.set()
        elif order.name == "e1.1":
            raise RunFailedError("its engine is gone, and its weights with it")

    assert done(folder, before, stopping).runs["base"].steps == 3 + 4
    # a resume does not know how many there were: it may have trained until its next evaluation
    assert done(folder, before).runs["e1"].steps == 2 + 4


def test_a_server_that_is_gone_is_done_without(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "study", proposer=GRID, servers=["http://gone", "http://there"])

    def before(server: str, order: Order) -> None:
        if server == "http://gone":
            raise ServerGoneError("http://gone does not answer")

    state = done(folder, before)
    assert {run.server for run in state.runs.values()} == {"http://there"} and state.finished

    folder = folder_of(tmp_path / "other", proposer=GRID, servers=["http://gone"])
    with pytest.raises(StudyStoppedError, match="http://gone does not answer"):
        done(folder, before)
    assert read(folder).open_runs() == ["base"], "it waits to be resumed"
    assert done(folder).finished


def test_a_study_goes_on_elsewhere_when_its_server_is_renamed(tmp_path: Path) -> None:
    def before(server: str, order: Order) -> None:
        raise ServerGoneError(f"{server} does not answer")

    folder = folder_of(tmp_path / "study", proposer=GRID, servers=["http://gone"])
    with pytest.raises(StudyStoppedError):
        done(folder, before)
    declared = folder / "study.yaml"
    declared.write_text(declared.read_text().replace("http://gone", "http://there"))
    assert done(folder).finished


def test_a_score_that_is_no_number_fails_its_run_and_the_answer_says_so(tmp_path: Path) -> None:
    class Blind(ScriptedLab):
        def run(self, server: str, order: Order, stopping: threading.Event) -> RunEnding | None:
            return order.measure(0, [0.5, math.nan], {})

    folder = folder_of(tmp_path / "study", proposer=GRID)
    study = read_study(folder)
    (folder / "runs").mkdir(exist_ok=True)
    with Ledger(folder) as ledger:
        begin(study, folder, ledger)
        lab = Blind(study, folder / "runs" / "engines.jsonl")
        Runner(study, folder, ledger, lab, lambda kind, values: None).run(threading.Event())
        assert ledger.state.runs["base"].why == "a score of step 0 is not a finite number"
        text = markdown(study, ledger.state, "report.png")
    assert "There is no result: the base run failed: a score of step 0" in text


def test_runs_begin_with_the_model_and_take_no_step_during_an_evaluation(tmp_path: Path) -> None:
    jobs: list[TrainJob] = []
    folder = folder_of(tmp_path / "study", proposer=GRID)
    done(folder, lambda server, order: jobs.append(order.job))
    assert {(one.resume, one.serving) for one in jobs} == {(False, "between_steps")}


def test_a_stop_leaves_it_to_be_resumed(tmp_path: Path) -> None:
    folder, stopping = folder_of(tmp_path / "study", proposer=GRID), threading.Event()

    def before(server: str, order: Order) -> None:
        if order.run.name == "e1":
            stopping.set()

    state = done(folder, before, stopping)
    assert state.finished is None and state.open_runs() == ["e1"]
    assert done(folder).finished


def test_a_stop_that_reaches_the_proposer_is_no_failure_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, stopping = folder_of(tmp_path / "study", proposer=GRID), threading.Event()

    def interrupted(*_: object) -> None:
        stopping.set()
        raise ProposerError("claude ended with -2")

    with monkeypatch.context() as patched:
        patched.setattr("swarm.research.running.propose", interrupted)
        state = done(folder, stopping=stopping)
    assert (state.finished, state.exhausted, state.experiments) == (None, None, {})
    assert done(folder).finished


def test_the_evaluator_may_not_change_before_a_resume(tmp_path: Path) -> None:
    folder, stopping = folder_of(tmp_path / "study", proposer=GRID), threading.Event()
    stopping.set()
    done(folder, stopping=stopping)
    (folder / "evaluate.py").write_text("def score(task):\n    return 1\n")
    with pytest.raises(ConfigError, match="is not the one that the study began with"):
        done(folder)


def test_a_rehearsal_is_two_short_runs_without_a_verdict(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "study", proposer={"kind": "grid", "space": {"lr": [3e-5, 1e-5]}})
    study = rehearsal(read_study(folder))
    place = folder / "runs" / "quick"
    place.mkdir(parents=True)
    with Ledger(place) as ledger:
        begin(study, folder, ledger)
        lab = ScriptedLab(study, folder / "runs" / "engines.jsonl")
        Runner(study, folder, ledger, lab, lambda kind, values: None).run(threading.Event())
        assert list(ledger.state.runs) == ["base", "e1"] and ledger.state.chosen == []
        assert [sorted(one.scores) for one in ledger.state.runs.values()] == [[0, 2], [2]]
    assert not (folder / "ledger.jsonl").exists()


def test_a_rehearsal_without_an_experiment_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lab(study: Study, *rest: object) -> ScriptedLab:
        return ScriptedLab(study, tmp_path / "engines.jsonl")

    monkeypatch.setattr("swarm.research.lab.Lab", lab)
    folder = folder_of(tmp_path / "study", proposer={"kind": "function", "function": "mine:propose"})
    (folder / "mine.py").write_text('def propose(state):\n    return {"hypothesis": "h", "set": {"lr": -1}}\n')
    subprocess.run(["git", "-C", str(folder), "add", "--all"], check=True)
    result = invoke("run", folder, "--quick")
    assert result.exit_code == 1
    assert "no experiment was run: " in result.output and "lr" in result.output
    lines = invoke("run", folder, "--quick", "--json").stdout.splitlines()
    assert lines and all("event" in json.loads(line) for line in lines)
    # it uses the study's folder for copies of the code
    with Ledger(folder):
        result = invoke("run", folder, "--quick")
    assert result.exit_code != 0 and "another process runs the study" in str(result.exception or result.output)


def test_a_log_on_a_full_disk_ends_no_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(message: str, **_: object) -> None:
        lost.append(message)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def lab(study: Study, *rest: object) -> ScriptedLab:
        return ScriptedLab(study, tmp_path / "engines.jsonl")

    lost: list[str] = []
    monkeypatch.setattr("swarm.research.lab.Lab", lab)
    folder = folder_of(tmp_path / "study", proposer={"kind": "grid", "space": {"lr": [3e-5]}})
    monkeypatch.setattr("typer.echo", full)
    invoke("run", folder)
    assert read(folder).finished and any("base begins" in line for line in lost)


def test_what_a_proposer_writes_commands_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lab(study: Study, *rest: object) -> ScriptedLab:
        return ScriptedLab(study, tmp_path / "engines.jsonl")

    monkeypatch.setattr("swarm.research.lab.Lab", lab)
    folder = folder_of(tmp_path / "study", proposer={"kind": "function", "function": "mine:propose"})
    hypothesis = "a\x1b]0;owned\x07\nb"
    (folder / "mine.py").write_text(
        f"def propose(state):\n    return {{'hypothesis': {hypothesis!r}, 'set': {{'lr': -1}}}}\n"
    )
    subprocess.run(["git", "-C", str(folder), "add", "--all"], check=True)
    for output in (invoke("run", folder).output, invoke("status", folder).output):
        assert "]0;owned" in output and "\x1b" not in output


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments])


@pytest.mark.slow
def test_status_and_report_of_a_study(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "study", proposer=GRID)
    assert "not begun" in invoke("status", folder).output
    done(folder)
    said = invoke("status", folder).output
    assert "finished" in said and "e1: kept: lr=3e-05 is better than the base (3 seeds" in said
    assert '"phase": "finished"' in invoke("status", folder, "--json").output
    assert invoke("report", folder).exit_code == 0
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "![scores by training step](report.png)" in (folder / "report.md").read_text()


def test_the_processes_of_a_run_have_the_token_in_a_servers_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWARM_TOKEN", raising=False)
    monkeypatch.setattr("swarm.research.lab.EVALUATIONS", 1)
    folder = folder_of(tmp_path / "study")
    study = read_study(folder)
    with Ledger(folder) as ledger, ScriptedServer() as server:
        begin(study, folder, ledger)
        tree = trees.kept(folder, ledger.state.code, "run/base")
        job = study.base_job.model_copy(update={"project": project_of(ledger.state), "experiment": "base.1"})
        server.script("/status", at(0, job=job))
        order = Order(Run(BASE), "base.1", job, {}, tree, False, frozenset(), lambda step: None, lambda *_: None)
        lab = Lab(study, folder, ledger.state, None, lambda kind, values: None)
        # no episode can be claimed there
        ending = lab.run(server.url.replace("//", "//x:secret@"), order, threading.Event())
        assert ending is not None and ending.why.startswith("the evaluation failed 1 times")
        assert server.bodies("/claim_episode")
        assert {received.headers.get("authorization") for received in server.requests} == {"Bearer secret"}


def test_a_token_in_a_servers_address_is_in_no_ledger(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "study", servers=["http://x:secret@127.0.0.1:1"], proposer=GRID)

    def fail(server: str, order: Order) -> None:
        raise ServerGoneError("it is away")

    with pytest.raises(StudyStoppedError):
        done(folder, fail)
    assert done(folder).finished
    # the attempt goes on at its server
    assert {run["attempt"] for run in told(folder / "ledger.jsonl") if run["event"] == "claimed"} == {1}
    assert "secret" not in (folder / "ledger.jsonl").read_text()
    with pytest.raises(ServerGoneError) as caught:
        study = read_study(folder)
        lab = Lab(study, folder, read(folder), None, lambda kind, values: None)
        job = study.base_job
        order = Order(Run(BASE), "base.1", job, {}, trees.Tree("", folder, b""), False, frozenset(), print, print)
        lab.run(study.servers[0], order, threading.Event())
    assert "secret" not in caught.value.message
