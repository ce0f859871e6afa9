"""``swarm-gateway train`` with real Ray, verl and vLLM: a short file and a short workflow train the tiny model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.reports.report import TrainingReport, read_report
from tests.engine import tiny_model
from tests.engine.engine_process import DEVICE, TOLERANCE
from tests.gateway.train_process import HELD, TrainProcess, check_resume

pytestmark = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs the cpu extra")

COMMAND = (sys.executable, "-m", "gateway.cli", "train", "my.yaml", "--json")
SECONDS = 900.0

FILE = """\
job: {model: tiny, device: DEVICE, batch_size: 2, num_repeat: 4, lr: 1.0e-3, total_training_steps: 2,
      max_prompt_length: 128, max_response_length: 24, logger: [console, tensorboard],
      max_staleness: 0}
workflow: letters:solve
tasks: {train: words.jsonl, validation: "letters:held_out"}
eval: {every_steps: 1, samples: 2}
swarm: {port: 0, run_dir: run}
""".replace("DEVICE", DEVICE)
WORKFLOW = """\
from swarm.types import Task, WorkflowOutput

def held_out():
    yield from (Task(task_id=word, main_query=word) for word in ("red", "blue"))

def solve(task, client):
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": task.main_query}])
    text = answer.choices[0].message.content or ""
    share = sum(one.isascii() and one.isalpha() for one in text) / max(1, len(text))
    return WorkflowOutput(reward=share, is_success=share > 0.3, log_metrics={"length": len(text)})
"""


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What verl's tensorboard logger wrote: values by step, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[int, float]] = {}
    for file in folder.rglob("events.out.tfevents.*"):
        events: Any = EventAccumulator(str(file))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, {}).update({one.step: one.value for one in events.Scalars(name)})
    return found


@pytest.mark.engine
def test_a_short_file_and_a_short_workflow_train_the_model(tmp_path: Path) -> None:
    tiny_model.build(tmp_path / "tiny")
    (tmp_path / "my.yaml").write_text(FILE)
    (tmp_path / "letters.py").write_text(WORKFLOW)
    (tmp_path / "words.jsonl").write_text("".join(f'{{"question": "say {n}"}}\n' for n in range(50)))
    with TrainProcess(COMMAND, tmp_path, TENSORBOARD_DIR=str(tmp_path / "tensorboard")) as run:
        assert run.ended(SECONDS) == 0, run.tail
    events = run.events
    steps = {one["step"]: one["metrics"] for one in events if one["event"] == "step"}
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        assert metrics["actor/grad_norm"] > 0
        assert metrics["training/rollout_probs_diff_max"] < TOLERANCE
        # what the watch over the training reads
        weights = {
            f"rollout_corr/{name}" for name in ("kl", "chi2_token", "rollout_is_mean", "rollout_is_eff_sample_size")
        }
        assert weights | {"actor/entropy", "response_length/mean", "swarm/repetition"} <= metrics.keys()
    evaluations = {one["step"]: one for one in events if one["event"] == "evaluation"}
    assert {step: (one["finished"], one["failed"]) for step, one in evaluations.items()} == {
        0: (4, 0),
        1: (4, 0),
        2: (4, 0),
    }
    report = read_report(tmp_path / "run")
    assert isinstance(report, TrainingReport) and report.stopped_because == "all steps are done"
    assert [one.step for one in report.steps] == [1, 2]
    # the server counted by the version that sampled, and no evaluation saw the weights of another step
    assert {one.step: one.episodes for one in report.evaluations} == {0: 4, 1: 4, 2: 4}
    for point in report.evaluations:
        assert point.reward_mean == pytest.approx(evaluations[point.step]["mean_reward"])
        assert point.success_rate == pytest.approx(evaluations[point.step]["success_rate"])
    assert (tmp_path / "run" / "report.png").stat().st_size > 0
    # verl's own loggers have both
    logged = scalars(tmp_path / "tensorboard")
    for name in ("swarm/reward_mean", "swarm/success_rate", "swarm/calls_mean", "swarm/log/length"):
        assert logged[name] == {step: pytest.approx(metrics[name]) for step, metrics in steps.items()}, name
    assert logged["eval/reward_mean"] == {one.step: pytest.approx(one.reward_mean) for one in report.evaluations}


# two boots more than CI has time for
@pytest.mark.long
def test_an_interrupted_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    tiny_model.build(tmp_path / "tiny")
    job = FILE[: FILE.index("workflow:")].replace("total_training_steps: 2", "total_training_steps: 3, save_freq: 1")
    rest = "workflow: letters:held\ntasks: {train: words.jsonl}\nswarm: {port: 0, run_dir: run}\n"
    (tmp_path / "my.yaml").write_text(job.replace("console, tensorboard", "console") + rest)
    (tmp_path / "letters.py").write_text(WORKFLOW + HELD)
    (tmp_path / "words.jsonl").write_text("".join(f'{{"question": "say {n}"}}\n' for n in range(50)))
    check_resume(COMMAND, tmp_path, "words.jsonl", SECONDS)
