"""``swarm-gateway train`` with real Ray, verl and vLLM: a short file and a short workflow train the tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.replay.report import TrainingReport, read_report
from tests.engine import tiny_model
from tests.engine.engine_process import processes_with

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs the cpu extra"),
]

ROOT = Path(__file__).parents[2]
MARK = "SWARM_GATEWAY_TRAIN_TEST"
SECONDS = 900.0

FILE = """\
job: {model: tiny, device: cpu, batch_size: 2, num_repeat: 4, lr: 1.0e-3, total_training_steps: 2,
      max_prompt_length: 128, max_response_length: 24, logger: [console, tensorboard],
      max_staleness: 0, save_freq: 1}
workflow: letters:solve
tasks: {train: words.jsonl, validation: "letters:held_out"}
eval: {every_steps: 1, samples: 2}
swarm: {port: 0, run_dir: run}
"""
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


def train(folder: Path, mark: str, *options: str, until: tuple[str, int] = ("", 0)) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and events of the command; Ctrl-C once it prints the event ``until`` of that step."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli", "train", str(folder / "my.yaml"), "--json", *options],
        cwd=folder,
        env={
            **os.environ,
            MARK: mark,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
            "TENSORBOARD_DIR": str(folder / "tensorboard"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # reading ends with the process
    deadline = threading.Timer(SECONDS, process.kill)
    deadline.start()
    lines: list[str] = []
    events: list[dict[str, Any]] = []
    try:
        with process:
            for line in process.stdout or ():
                lines.append(line)
                if line.startswith("{"):
                    events.append(json.loads(line))
                    if (events[-1]["event"], events[-1].get("step")) == until:
                        process.send_signal(signal.SIGINT)
        left = processes_with(MARK, mark)
    finally:
        deadline.cancel()
        for one in processes_with(MARK, mark):
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
    assert process.returncode in (0, 130), "".join(lines)[-4000:]
    assert not left
    return process.returncode, events


def steps_of(events: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    return {one["step"]: one["metrics"] for one in events if one["event"] == "step"}


def test_a_short_file_and_a_short_workflow_train_the_model_and_go_on_after_a_ctrl_c(tmp_path: Path) -> None:
    tiny_model.build(tmp_path / "tiny")
    (tmp_path / "my.yaml").write_text(FILE)
    (tmp_path / "letters.py").write_text(WORKFLOW)
    (tmp_path / "words.jsonl").write_text("".join(f'{{"question": "say {n}"}}\n' for n in range(50)))
    mark = uuid.uuid4().hex
    # train episodes pause until the evaluation is over, so the second step has not begun
    code, first = train(tmp_path, mark, until=("evaluation", 1))
    assert (code, sorted(steps_of(first))) == (130, [1])
    assert read_report(tmp_path / "run").interrupted
    code, second = train(tmp_path, mark, "--resume")
    assert (code, sorted(steps_of(second))) == (0, [2])
    steps = steps_of(first) | steps_of(second)
    for metrics in steps.values():
        assert metrics["actor/grad_norm"] > 0
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
    told = [(one["step"], one["finished"], one["failed"]) for one in first + second if one["event"] == "evaluation"]
    # the weights that it goes on from are tried again
    assert told == [(0, 4, 0), (1, 4, 0), (1, 4, 0), (2, 4, 0)]
    evaluations = {one["step"]: one for one in second if one["event"] == "evaluation"}
    report = read_report(tmp_path / "run")
    assert isinstance(report, TrainingReport) and report.stopped_because == "all steps are done"
    assert [one.step for one in report.steps] == [1, 2]
    # the server counted by the version that sampled, and no evaluation saw the weights of another step
    assert {one.step: one.episodes for one in report.evaluations} == {0: 4, 1: 8, 2: 4}
    for point in report.evaluations[2:]:
        assert point.reward_mean == pytest.approx(evaluations[point.step]["mean_reward"])
        assert point.success_rate == pytest.approx(evaluations[point.step]["success_rate"])
    assert (tmp_path / "run" / "report.png").stat().st_size > 0
    # verl's own loggers have both
    logged = scalars(tmp_path / "tensorboard")
    for name in ("swarm/reward_mean", "swarm/success_rate", "swarm/calls_mean", "swarm/log/length"):
        assert logged[name] == {step: pytest.approx(metrics[name]) for step, metrics in steps.items()}, name
    assert logged["eval/reward_mean"] == {one.step: pytest.approx(one.reward_mean) for one in report.evaluations}
