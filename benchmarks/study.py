"""A study of 12 experiments with the real verl and vLLM: what it finds, and whether kills change anything.

``python -m benchmarks study --kills 20`` runs ``swarm-gateway research`` on a swarm server and kills it again and
again; ``--control shuffle`` permutes the rewards of every run, so that there is nothing to find. The tiny model has
been taught to say digits, somewhat more often the right one (:mod:`benchmarks.credit`); ``benchmarks/digits`` says what
is trained. The base job learns next to nothing; the grid has four learning rates and three rewards, one of which says
nothing.

Printed: the verdict of each experiment, the confirmation's scores by arm, the runs, attempts and hours. It ends with an
error if an experiment has no verdict, if an engine was started twice for one attempt, or if an attempt was lost: a kill
must cost none.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from benchmarks.credit import TURNS, teach
from benchmarks.processes import BOOT_SECONDS, ROOT, running, swarm_server
from swarm.research.decisions import arm_scores
from swarm.research.ledger import BASE, State, read
from swarm.research.study import read_study
from tests.swarm.research.making import tracked
from tests.swarm.research.storm import ran

HOURS = 3.0
HELD_OUT, TRAINED_ON = 40, 400
GRID = {"lr": [1e-4, 3e-4, 1e-3, 3e-3], "settings.right": [0.0, 0.5, 1.0]}


def declared(model: Path, server: str, options: argparse.Namespace) -> dict[str, Any]:
    """``study.yaml``."""
    return {
        "question": "Which learning rate and which reward teach the model to repeat a digit?",
        "job": {
            "model": str(model),
            "served_model_name": "policy",
            "device": "cpu",
            "batch_size": 16,
            "num_repeat": 4,
            "max_prompt_length": 128,
            "max_response_length": 8,
            "lr": 1e-6,
            "total_training_steps": options.steps,
        },
        "workflow": "agent:solve",
        "settings": {"right": 1.0},
        "tasks": "train.jsonl",
        "control": options.control,
        "evaluator": {
            "workflow": "evaluate:score",
            "tasks": "held_out.jsonl",
            "samples": 4,
            "every_steps": options.steps,
        },
        "locked": ["evaluate.py", "held_out.jsonl"],
        "proposer": {"kind": "grid", "space": GRID},
        "budget": {"runs": 40, "hours": HOURS},
        "decision": {"min_effect": 0.02},
        "servers": [server],
        "boot_seconds": BOOT_SECONDS,
    }


def write(folder: Path, study: dict[str, Any]) -> Path:
    """The study in a git checkout; no conversation of the held-out tasks is trained on."""
    shutil.copytree(ROOT / "benchmarks" / "digits", folder, ignore=shutil.ignore_patterns("__pycache__"))
    digits = random.Random(0).sample(range(10**TURNS), HELD_OUT + TRAINED_ON)
    talks = [" ".join(f"{number:0{TURNS}}") for number in digits]
    for name, part in (("held_out", talks[:HELD_OUT]), ("train", talks[HELD_OUT:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"question": one}) + "\n" for one in part))
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    (folder / ".gitignore").write_text("runs/\n")
    return tracked(folder)


def check(state: State, started: Counter[str]) -> None:
    """None lost, none done twice."""
    assert state.finished is not None and all(one.verdict for one in state.experiments.values()), "it has no end"
    assert all(run.outcome is not None for run in state.runs.values()), "a run has no end"
    expected = Counter(f"{name}.{run.attempt}" for name, run in state.runs.items())
    assert started == expected, f"engines were started for {started}, runs were done by {expected}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--most", type=int, default=5, help="events of the ledger between two kills")
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument("--control", choices=("none", "shuffle"), default="none")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--keep", type=Path, help="put the study there, with its ledger and report")
    parser.add_argument("--json", type=Path, help="write the report there")


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as place:
        top = Path(place)
        model = teach(top / "model", 0)
        began = time.monotonic()
        real = functools.partial(swarm_server, engine_command=None)
        with running(real, str(top / "server")) as server:
            folder = write(top / "study", declared(model, server.url, options))
            killed = ran(folder, options.kills, random.Random(options.seed), options.most, seconds=HOURS * 3600)
        state, study = read(folder), read_study(folder)
        starts = [json.loads(one.read_text()) for one in (top / "server" / "history").iterdir()]
        command = [sys.executable, "-m", "gateway.cli", "research", "report", str(folder)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        if options.keep is not None:
            shutil.copytree(folder, options.keep, dirs_exist_ok=True)
        arms = {name: ((name, "seed"), (BASE, "seed"), (name, "control")) for name in state.chosen or ()}
        report = {
            "kills": killed,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "runs": len(state.runs),
            "attempts": sum(one.attempt for one in state.runs.values()),
            "engine_hours": round(state.hours, 2),
            "finished": state.finished,
            "base": state.runs[BASE].means,
            "experiments": {
                name: {
                    **one.delta,
                    "score": state.runs[name].means.get(study.steps),
                    "verdict": one.verdict,
                    "why": one.why,
                }
                for name, one in state.experiments.items()
            },
            "confirmed": {
                name: {f"{of}.{arm}": arm_scores(study, state, of, arm) for of, arm in pairs}
                for name, pairs in arms.items()
            },
        }
    print(json.dumps(report, indent=2))
    check(state, Counter(one["job"]["experiment"] for one in starts))
    if options.json is not None:
        options.json.write_text(json.dumps(report) + "\n")
