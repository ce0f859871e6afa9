"""The loop: client processes train on their parts of the problems, and held-out problems measure what came of it.

    python agent_roll.py --quick
    python agent_roll.py --steps 48 --out out/trained
    python agent_roll.py --steps 48 --out out/control --shuffle-rewards

Each run starts the engine with the model's own weights. The control differs in one thing: the rewards of each group are
permuted among its episodes, so that they say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
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
from swarm.errors import SwarmGatewayError
from swarm.job import TrainJob
from swarm.types import Task, WorkflowOutput

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.held_out import interval  # noqa: E402

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
                uuids = [api.episode_uuid for api in episodes.episodes]
                episodes.end(task, dict(zip(uuids, outputs, strict=True)))

        client.run_episodes_until_all_complete(problems(), group, max_workers=2)


def run_all(task: Task, apis: list[Any], tools: bool) -> list[WorkflowOutput]:
    """All episodes of a group at once."""
    with ThreadPoolExecutor(len(apis)) as pool:
        return list(pool.map(lambda api: execute(task, api, tools), apis))


def permuted(outputs: list[WorkflowOutput], draw: random.Random) -> list[WorkflowOutput]:
    rewards = [output.reward for output in outputs]
    draw.shuffle(rewards)
    return [
        output.model_copy(update={"reward": reward, "is_success": None})
        for output, reward in zip(outputs, rewards, strict=True)
    ]


def held_out(client: SwarmClient, arguments: argparse.Namespace) -> dict[str, Any]:
    """Accuracy on the held-out problems in eval episodes, with a bootstrap 95 % interval over problems."""
    tasks = list(read_tasks(HERE / "held_out.jsonl"))[: arguments.problems]

    def accuracy(task: Task) -> float:
        with client.group(arguments.samples, episode_type="eval", discard_episode_timeout=IDLE_SECONDS) as episodes:
            outputs = run_all(task, episodes.episodes, arguments.tools)
            uuids = [api.episode_uuid for api in episodes.episodes]
            episodes.end(task, dict(zip(uuids, outputs, strict=True)))
            return fmean(output.reward for output in outputs)

    values = client.run_episodes_until_all_complete(tasks, accuracy, max_workers=4)
    known = [value for value in values if value is not None]
    if len(known) < len(tasks):
        raise SystemExit(f"agent_roll: {len(tasks) - len(known)} held-out problems got no answer")
    low, high = interval(known, 10_000, 0)
    step = client.get_global_step()
    print(f"  step {step}: held-out accuracy {fmean(known):.3f} [{low:.3f}, {high:.3f}]", flush=True)
    return {"step": step, "mean": fmean(known), "low": low, "high": high, "problems": known}


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


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the math agent and measure it on held-out problems.")
    parser.add_argument("--swarm-url", default=SWARM_URL)
    parser.add_argument("--model", default="", help="another model than job.yaml's")
    parser.add_argument("--steps", type=int, default=48, help="training steps")
    parser.add_argument("--every", type=int, default=8, help="steps between two looks at the held-out problems")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--problems", type=int, default=32, help="held-out problems")
    parser.add_argument("--samples", type=int, default=8, help="answers to each")
    parser.add_argument("--tools", action="store_true", help="offer the calculator; the chat template must know tools")
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the problems")
    parser.add_argument("--out", type=Path, default=Path("out/trained"), help="folder for curve.json")
    parser.add_argument("--quick", action="store_true", help="2 steps, 8 held-out problems, 4 answers to each")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.every, arguments.problems, arguments.samples = 2, 2, 8, 4
    if min(arguments.steps, arguments.every, arguments.clients, arguments.problems, arguments.samples) < 1:
        parser.error("numbers must be at least 1")
    return arguments


def main() -> int:
    arguments = parsed()
    changes = {"model": arguments.model} if arguments.model else {}
    job = TrainJob.build_job_from_yaml(HERE / "job.yaml", **changes)
    began = time.monotonic()
    try:
        with SwarmClient(arguments.swarm_url) as client:
            print(f"starting the engine with {job.model}", flush=True)
            client.auto_sync_train_config_and_start_engine(job, force_restart=True)
            print(f"  ready after {time.monotonic() - began:.0f} s", flush=True)
            curve = [held_out(client, arguments)]
            while (step := client.get_global_step()) < arguments.steps:
                until = min(step + arguments.every, arguments.steps)
                train(until, until - step, arguments)
                curve.append(held_out(client, arguments))
    except SwarmGatewayError as exc:
        print(f"agent_roll: {exc.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {"shuffled": arguments.shuffle_rewards, "model": job.model_name, "curve": curve}
    (arguments.out / "curve.json").write_text(json.dumps(result, indent=1) + "\n")
    first, last = curve[0], curve[-1]
    print(
        f"{'control: ' if arguments.shuffle_rewards else ''}held-out accuracy went from {first['mean']:.3f} to"
        f" {last['mean']:.3f} [{last['low']:.3f}, {last['high']:.3f}] in {last['step']} steps,"
        f" {time.monotonic() - began:.0f} s; {arguments.out / 'curve.json'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
