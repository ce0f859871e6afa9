"""The loop: walks over the lakes until the training steps are done; held-out lakes measure what came of it.

    python agent_roll.py --quick
    python agent_roll.py --steps 48 --out runs/trained
    python agent_roll.py --steps 48 --out runs/control --shuffle-rewards

Each run starts the engine with the model's own weights. The control differs in one thing: the rewards of each group are
permuted among its episodes, so that they say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_run import SWARM_URL, execute

from swarm.client import SwarmClient
from swarm.client.training import begin_training
from swarm.client.training_options import TrainOptions
from swarm.data import read_tasks
from swarm.job import read_job
from swarm.types import Task

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.curves import Curve, Point, keep, measured  # noqa: E402
from study.rolling import add_options, exit_code, parsed, started  # noqa: E402


def held_out(client: SwarmClient, arguments: argparse.Namespace) -> Point:
    """Successes and returns on the held-out lakes, in eval episodes."""
    tasks = list(read_tasks(HERE / "held_out.jsonl"))[: arguments.held_out]

    def walks(task: Task) -> dict[str, float]:
        with client.group(arguments.samples, episode_type="eval") as group, ThreadPoolExecutor() as pool:
            outputs = list(pool.map(lambda api: execute(task, api), group.episodes))
            group.end(task, outputs)
        return {
            "success": fmean(float(bool(output.is_success)) for output in outputs),
            "return": fmean(output.reward for output in outputs),
        }

    values = client.run_episodes_until_all_complete(tasks, walks, max_workers=4)
    return measured(client.get_global_step(), values)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the walker and measure it on held-out lakes.")
    parser.add_argument("--swarm-url", default=SWARM_URL)
    parser.add_argument("--model", default="", help="another model than job.yaml's")
    add_options(parser, held_out="lakes", samples="walks over")
    return parsed(parser)


def main() -> None:
    arguments = parsed_arguments()
    changes: dict[str, Any] = {"model": arguments.model} if arguments.model else {}
    job = read_job(HERE / "job.yaml", **changes)
    tasks = list(read_tasks(HERE / "train.jsonl"))
    random.Random(arguments.seed).shuffle(tasks)
    lakes = itertools.cycle(tasks)
    with started(arguments.swarm_url, job) as client:
        points = [held_out(client, arguments)]
        while (done := client.get_global_step()) < arguments.steps:
            steps = min(arguments.every, arguments.steps - done)
            options = TrainOptions(total_steps=steps, shuffle_rewards=arguments.shuffle_rewards)
            begin_training(lakes, client, execute, options).result()
            points.append(held_out(client, arguments))
    keep(Curve(shuffled=arguments.shuffle_rewards, model=job.model_name, points=points), arguments.out)


if __name__ == "__main__":
    sys.exit(exit_code(main))
