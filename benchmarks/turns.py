"""Steps per hour of a whole training loop whose agents take several turns, by how their calls become rows.

``python -m benchmarks turns``: ``swarm-gateway train`` with the real verl and vLLM on a CPU, with the arms in turn. An
episode is a conversation of ``--turns``: after each answer comes what a tool found, of about 64 tokens. With ``--agents
2`` two agents, each with a system prompt of its own, answer by turns, and each sees what both have said.

* ``ours``: calls that continue a recorded answer are one row (a timeline), and prefixes that rows share are computed
  once;
* ``timelines``: the same without shared prefixes;
* ``rows``: a row for each call, as in loops that record calls. The agent puts a dash before each answer that it
  sends on, so that no call continues a recorded answer; vLLM has the prefix all the same.

A step's seconds are those between the ends of two steps, and CPU seconds those of all processes; the first step of a
run does not count.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from openai import OpenAI

from benchmarks.loop import PASSAGE, Step, follow, run_arms, started, summary
from benchmarks.processes import BOOT_SECONDS
from swarm.types import Task, WorkflowOutput

ARMS = ("ours", "timelines", "rows")
TASKS, EPISODES = 2, 4
SYSTEMS = ("You write the keeper's book, line by line.", "You read the keeper's book and say what is missing in it.")
#: about 64 tokens
FOUND = (
    "The book of the year before says of day {number}: wind from the west, later none; clouds until noon; waves of a "
    "metre; two boats came in before the evening and one went out; nobody asked for the light, which burned all night "
    "as on the days before."
)


def converse(task: Task, client: OpenAI) -> WorkflowOutput:
    """The workflow: one conversation as the task's metadata says; the reward is only there to differ."""
    asked = task.metadata
    history: list[Any] = [{"role": "user", "content": task.main_query}]
    answer = ""
    for turn in range(asked["turns"]):
        system: Any = {"role": "system", "content": SYSTEMS[turn % asked["agents"]]}
        choice = client.chat.completions.create(
            model="policy", messages=[system, *history], max_tokens=asked["tokens"]
        ).choices[0]
        answer = choice.message.content or ""
        found = FOUND.format(number=asked["day"] + turn)
        history += [{"role": "assistant", "content": asked["edit"] + answer}, {"role": "user", "content": found}]
    return WorkflowOutput(reward=sum(map(str.isalpha, answer)) / max(1, len(answer)))


def write_run(arm: str, options: argparse.Namespace, folder: Path) -> Path:
    """The file of ``swarm-gateway train`` for one arm."""
    folder.mkdir(parents=True)
    # a batch ahead, and one that is begun
    tasks = [
        {
            "question": f"{PASSAGE} Write the keeper's book of day {day}.",
            "day": day,
            "turns": options.turns,
            "agents": options.agents,
            "tokens": options.tokens,
            "edit": "- " if arm == "rows" else "",
        }
        for day in range(TASKS * (options.steps + 3))
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    job = {
        "model": str(options.model),
        "served_model_name": "policy",
        "device": "cpu",
        "batch_size": TASKS,
        "num_repeat": EPISODES,
        "max_prompt_length": 512 + options.turns * (options.tokens + 128),
        "max_response_length": options.tokens,
        "lr": 1e-5,
        "total_training_steps": options.steps + 1,
        "shared_prefixes": "auto" if arm == "ours" else "off",
        "logger": ["console", "file"],
    }
    sections = {
        "job": job,
        "swarm": {"port": 0, "run_dir": "run", "boot_timeout": BOOT_SECONDS},
        "workflow": "benchmarks.turns:converse",
        "tasks": {"train": "tasks.jsonl"},
    }
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def measure(arm: str, options: argparse.Namespace, folder: Path) -> list[Step]:
    """Run one arm for ``options.steps`` steps after the first."""
    path, lines = write_run(arm, options, folder), folder / "steps.jsonl"
    command = [sys.executable, "-m", "gateway.cli", "train", str(path), "--json"]
    environment = {"VERL_FILE_LOGGER_PATH": str(lines), "OMP_WAIT_POLICY": "PASSIVE"}
    with started(arm, command, folder, environment) as (check, _):
        return follow(arm, lines, options.steps + 1, check, lambda done: None)


def report_of(runs: dict[str, list[list[Step]]]) -> dict[str, Any]:
    """The summary of each arm, and ours beside the others; of the runs of each round, and of all."""
    arms = {arm: summary(found) for arm, found in runs.items() if found}
    ratios: dict[str, Any] = {}
    for other in [arm for arm in arms if arm != "ours" and "ours" in arms]:
        rounds = [(summary([mine]), summary([its])) for mine, its in zip(runs["ours"], runs[other], strict=False)]
        ratios[f"ours / {other}"] = {
            "steps_per_hour": arms[other]["seconds"] / arms["ours"]["seconds"],
            "cpu": arms[other]["cpu_seconds"] / arms["ours"]["cpu_seconds"],
            "steps_per_hour_each": [its["seconds"] / mine["seconds"] for mine, its in rounds],
        }
    return {"arms": arms, "ratios": ratios}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="folder or known name")
    parser.add_argument("--turns", type=int, default=6, help="of each conversation")
    parser.add_argument("--agents", type=int, choices=(1, 2), default=1, help="who answer by turns")
    parser.add_argument("--tokens", type=int, default=32, help="longest answer")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run after the first")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each arm, in turn")
    parser.add_argument("--only", choices=ARMS, nargs="+", default=ARMS)
    parser.add_argument("--json", type=Path, help="write the report, with all steps, there; after each run")


def run(options: argparse.Namespace) -> None:
    run_arms(options, measure, report_of)
