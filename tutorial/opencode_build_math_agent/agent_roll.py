"""The loop: client processes train on their parts of the problems, and held-out problems measure what came of it.

    python agent_roll.py --quick
    python agent_roll.py --steps 48 --out runs/trained
    python agent_roll.py --steps 48 --out runs/control --shuffle-rewards

Each run starts the engine with the model's own weights. The control differs in one thing: the rewards of each group are
permuted among its episodes, so that they say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_run import SWARM_URL, execute

from swarm.client import SwarmClient
from swarm.data import read_tasks
from swarm.job import read_job
from swarm.types import Task, WorkflowOutput

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.curves import Curve, Point, keep, measured, permuted  # noqa: E402
from study.rolling import add_options, exit_code, parsed, started  # noqa: E402

STEP_SECONDS = 400.0
IDLE_SECONDS = 120.0  # without a model call, an episode is given to somebody else


def learn(part: int, until: int, arguments: argparse.Namespace) -> None:
    """One client process: roll groups of its part of the problems until training step ``until`` is done."""
    draw = random.Random(f"{arguments.seed}/{until}/{part}")
    tasks = list(read_tasks(HERE / "train.jsonl"))[part :: arguments.clients]
    draw.shuffle(tasks)
    with SwarmClient(arguments.swarm_url) as client:
        job = client.status().job
        assert job is not None

        def problems() -> Iterator[Task]:
            for task in itertools.cycle(tasks):
                if client.get_global_step() >= until:
                    return
                yield task

        def group(task: Task) -> None:
            share = {"ratio": 1 / arguments.clients, "current_task_id": task.task_id}
            with client.group(job.num_repeat, discard_episode_timeout=IDLE_SECONDS, throttle_policy=share) as episodes:
                if client.get_global_step() >= until:
                    return  # the last step was taken while this one waited: leaving the block gives the group back
                outputs = run_all(task, episodes.episodes, arguments.tools)
                if arguments.shuffle_rewards:
                    outputs = permuted(outputs, draw)
                episodes.end(task, outputs)

        client.run_episodes_until_all_complete(problems(), group, max_workers=2)


def run_all(task: Task, apis: list[Any], tools: bool) -> list[WorkflowOutput]:
    """All episodes of a group at once."""
    with ThreadPoolExecutor(len(apis)) as pool:
        return list(pool.map(lambda api: execute(task, api, tools), apis))


def held_out(client: SwarmClient, arguments: argparse.Namespace) -> Point:
    """Accuracy on the held-out problems in eval episodes."""
    tasks = list(read_tasks(HERE / "held_out.jsonl"))[: arguments.held_out]

    def accuracy(task: Task) -> dict[str, float]:
        with client.group(arguments.samples, episode_type="eval", discard_episode_timeout=IDLE_SECONDS) as episodes:
            outputs = run_all(task, episodes.episodes, arguments.tools)
            episodes.end(task, outputs)
            return {"held-out accuracy": fmean(output.reward for output in outputs)}

    values = client.run_episodes_until_all_complete(tasks, accuracy, max_workers=4)
    return measured(client.get_global_step(), values)


def train(until: int, steps: int, arguments: argparse.Namespace) -> None:
    """Run the client processes until step ``until``, ``steps`` from now; all of them end within a deadline."""
    spawn = multiprocessing.get_context("spawn")
    clients = [spawn.Process(target=learn, args=(part, until, arguments)) for part in range(arguments.clients)]
    deadline = time.monotonic() + steps * STEP_SECONDS
    for one in clients:
        one.start()
    try:
        for one in clients:
            one.join(max(0.0, deadline - time.monotonic()))
        if failed := [one.exitcode for one in clients if one.exitcode != 0]:
            raise SystemExit(f"agent_roll: client processes failed or took too long (exit codes {failed})")
    finally:
        for one in clients:
            one.kill()


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the math agent and measure it on held-out problems.")
    parser.add_argument("--swarm-url", default=SWARM_URL)
    parser.add_argument("--model", default="", help="another model than job.yaml's")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--tools", action="store_true", help="offer the calculator; the chat template must know tools")
    add_options(parser, held_out="problems", samples="answers to")
    return parsed(parser)


def main() -> None:
    arguments = parsed_arguments()
    changes: dict[str, Any] = {"model": arguments.model} if arguments.model else {}
    if arguments.tools:
        changes["max_response_length"] = 256  # all calls of an episode and the calculator's results
    job = read_job(HERE / "job.yaml", **changes)
    with started(arguments.swarm_url, job) as client:
        curve = [held_out(client, arguments)]
        while (step := client.get_global_step()) < arguments.steps:
            until = min(step + arguments.every, arguments.steps)
            train(until, until - step, arguments)
            curve.append(held_out(client, arguments))
    keep(Curve(shuffled=arguments.shuffle_rewards, model=job.model_name, points=curve), arguments.out)


if __name__ == "__main__":
    sys.exit(exit_code(main))
