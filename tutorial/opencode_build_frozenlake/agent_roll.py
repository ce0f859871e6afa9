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
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_run import SWARM_URL, execute

from swarm.client import SwarmClient
from swarm.client.training import begin_training
from swarm.client.training_run import TrainOptions
from swarm.data import read_tasks
from swarm.errors import SwarmGatewayError
from swarm.job import TrainJob
from swarm.types import Task

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.curves import Curve, Point, keep, measured  # noqa: E402


def held_out(client: SwarmClient, arguments: argparse.Namespace) -> Point:
    """Successes and returns on the held-out lakes, in eval episodes."""
    tasks = list(read_tasks(HERE / "held_out.jsonl"))[: arguments.lakes]

    def walks(task: Task) -> dict[str, float]:
        with client.group(arguments.samples, episode_type="eval") as group, ThreadPoolExecutor() as pool:
            outputs = list(pool.map(lambda api: execute(task, api), group.episodes))
            group.end(task, dict(zip(group.episodes.episode_uuids, outputs, strict=True)))
        return {
            "success": fmean(float(bool(output.is_success)) for output in outputs),
            "return": fmean(output.reward for output in outputs),
        }

    values = client.run_episodes_until_all_complete(tasks, walks, max_workers=4)
    return measured(client.get_global_step(), values)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the walker and measure it on held-out lakes.")
    parser.add_argument("--swarm-url", default=SWARM_URL)
    parser.add_argument("--model", default="", help="another model than job.yaml's")
    parser.add_argument("--steps", type=int, default=48, help="training steps")
    parser.add_argument("--every", type=int, default=8, help="steps between two looks at the held-out lakes")
    parser.add_argument("--lakes", type=int, default=32, help="held-out lakes")
    parser.add_argument("--samples", type=int, default=8, help="walks over each")
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the lakes")
    parser.add_argument("--out", type=Path, default=Path("runs/trained"), help="folder for curve.json")
    parser.add_argument("--quick", action="store_true", help="2 steps, 8 held-out lakes, 4 walks over each")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.every, arguments.lakes, arguments.samples = 2, 2, 8, 4
    if min(arguments.steps, arguments.every, arguments.lakes, arguments.samples) < 1:
        parser.error("numbers must be at least 1")
    return arguments


def main() -> int:
    arguments = parsed()
    changes: dict[str, Any] = {"model": arguments.model} if arguments.model else {}
    job = TrainJob.build_job_from_yaml(HERE / "job.yaml", **changes)
    tasks = list(read_tasks(HERE / "train.jsonl"))
    random.Random(arguments.seed).shuffle(tasks)
    lakes = itertools.cycle(tasks)
    began = time.monotonic()
    try:
        with SwarmClient(arguments.swarm_url) as client:
            client.auto_sync_train_config_and_start_engine(job, force_restart=True)
            print(f"the engine is ready after {time.monotonic() - began:.0f} s", flush=True)
            points = [held_out(client, arguments)]
            while (done := client.get_global_step()) < arguments.steps:
                steps = min(arguments.every, arguments.steps - done)
                options = TrainOptions(total_steps=steps, shuffle_rewards=arguments.shuffle_rewards)
                begin_training(lakes, client, execute, options).result()
                points.append(held_out(client, arguments))
    except SwarmGatewayError as exc:
        print(f"agent_roll: {exc.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    keep(Curve(shuffled=arguments.shuffle_rewards, model=job.model_name, points=points), arguments.out)
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
