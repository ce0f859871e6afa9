"""The tutorial of ``train``: its tasks, its reward, and a control that differs in nothing but the rewards."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from gateway.launch.train import TrainFile
from gateway.reports.report import TrainingReport, read_report
from swarm.importer import SourceFolder
from swarm.job import TrainJob
from tests.tutorial.readmes import TUTORIALS

FOLDER = TUTORIALS / "train_arithmetic"


@pytest.fixture(scope="module")
def arithmetic() -> ModuleType:
    return SourceFolder(FOLDER).module("arithmetic")


def test_no_sum_is_both_trained_and_tried(arithmetic: ModuleType) -> None:
    trained, tried = (
        [frozenset(one.task_id.split("+")) for one in tasks()] for tasks in (arithmetic.sums, arithmetic.held_out)
    )
    assert (len(trained), len(tried)) == (120, 24)
    assert not {*trained} & {*tried}


@pytest.mark.parametrize(
    ("answer", "reward", "success"),
    [
        ("7", 1.0, True),
        (" 7\n", 1.0, True),
        ("3 + 4 = 7", 0.5, True),
        ("8", 0.15, False),
        ("7 or 8", 0.15, False),
        ("seven", 0.0, False),
        ("", 0.0, False),
        (None, 0.0, False),
    ],
)
def test_the_right_number_alone_is_worth_most(
    arithmetic: ModuleType, answer: str | None, reward: float, success: bool
) -> None:
    choice = SimpleNamespace(message=SimpleNamespace(content=answer))

    def create(**_: object) -> SimpleNamespace:
        return SimpleNamespace(choices=[choice])

    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    output = arithmetic.solve(arithmetic.task((3, 4)), client)
    assert (output.reward, output.is_success) == (pytest.approx(reward), success)


def test_the_control_is_the_same_run_but_for_the_rewards() -> None:
    run, control = (yaml.safe_load((FOLDER / name).read_text()) for name in ("train.yaml", "control.yaml"))
    for one in (run, control):
        TrainJob.model_validate(TrainFile.model_validate(one).job)
    assert (run.pop("control", "none"), control.pop("control")) == ("none", "shuffle")
    assert run.pop("swarm") != control.pop("swarm")
    assert run == control


def check_readme(folder: Path, said: str) -> None:
    """What the commands of its readme leave; see ``test_readmes.py``."""
    report = read_report(folder / "runs" / "real" / "quick")
    assert isinstance(report, TrainingReport)
    assert [one.step for one in report.steps] == [1, 2]
    assert [one.step for one in report.evaluations] == [0, 2]
