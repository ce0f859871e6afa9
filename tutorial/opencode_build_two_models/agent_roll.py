"""The loop: for each problem a group of episodes at both servers, ended with rewards of their own.

    python agent_roll.py --quick
    python agent_roll.py --steps 48 --out runs/trained
    python agent_roll.py --steps 48 --out runs/control --shuffle-rewards

It trains the models that `swarm-gateway up up.yaml` runs, from the weights that they have. The control differs in one
thing: the rewards of each group are permuted among its episodes, so that they say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_run import execute

from swarm.client import Group, SwarmClient
from swarm.data import read_tasks
from swarm.errors import SwarmGatewayError
from swarm.states import EngineState
from swarm.types import Task, WorkflowOutput

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.curves import Curve, Point, keep, measured, permuted  # noqa: E402
from study.rolling import add_options, exit_code, parsed  # noqa: E402

PLANNER_URL = os.environ.get("PLANNER_URL", "http://127.0.0.1:10086")
SOLVER_URL = os.environ.get("SOLVER_URL", "http://127.0.0.1:10087")
BOOT_SECONDS = 900.0
MOST_FAILURES = 30
IDLE_SECONDS = 300.0  # without a model call, an episode is given to somebody else: the planner waits for the solver


@contextmanager
def begun(clients: Sequence[SwarmClient], count: int, **more: Any) -> Generator[list[Group]]:
    """``count`` episodes at each server. Those that are not ended when the block is left are given back, at both
    servers, whatever failed: the second claim, an agent, or an end."""
    with ExitStack() as groups:
        yield [
            groups.enter_context(client.group(count, discard_episode_timeout=IDLE_SECONDS, **more))
            for client in clients
        ]


def run(task: Task, groups: Sequence[Group]) -> list[list[WorkflowOutput]]:
    """All episodes of both groups at once, the first of the one with the first of the other; their outputs by group."""
    pairs = list(zip(*(group.episodes for group in groups), strict=True))
    with ThreadPoolExecutor(len(pairs)) as pool:
        outputs = list(pool.map(lambda pair: execute(task, *pair), pairs))
    return [list(one) for one in zip(*outputs, strict=True)]


def end(task: Task, groups: Sequence[Group], outputs: Sequence[Sequence[WorkflowOutput]]) -> None:
    for group, rewarded in zip(groups, outputs, strict=True):
        group.end(task, rewarded)


def learn(clients: Sequence[SwarmClient], until: int, arguments: argparse.Namespace) -> None:
    """Roll groups until both models have done training step ``until``.

    Raises:
        SwarmGatewayError: :data:`MOST_FAILURES` groups in a row failed.
    """
    draw = random.Random(f"{arguments.seed}/{until}")
    tasks = list(read_tasks(HERE / "train.jsonl"))
    draw.shuffle(tasks)
    job = clients[0].status().job
    assert job is not None
    failures: list[Exception] = []  # of the groups since the last one that succeeded

    def done() -> bool:
        return min(client.get_global_step() for client in clients) >= until

    def problems() -> Iterator[Task]:
        yield from itertools.takewhile(lambda _: len(failures) < MOST_FAILURES and not done(), itertools.cycle(tasks))

    def counted(task: Task) -> None:
        try:
            both(task)
        except Exception as exc:
            failures.append(exc)
            raise
        failures.clear()

    def both(task: Task) -> None:
        with begun(clients, job.num_repeat) as groups:
            if done():
                return  # the last step was taken while this one waited: leaving the block gives the groups back
            outputs = run(task, groups)
            if arguments.shuffle_rewards:
                outputs = [permuted(one, draw) for one in outputs]
            end(task, groups, outputs)

    with suppress(ExceptionGroup):  # if all failed
        clients[0].run_episodes_until_all_complete(problems(), counted, max_workers=job.batch_size)
    if len(failures) >= MOST_FAILURES:
        raise SwarmGatewayError(f"{len(failures)} groups in a row failed, the last one: {failures[-1]}")


def held_out(clients: Sequence[SwarmClient], arguments: argparse.Namespace) -> Point:
    """The shares of right plans, of right solutions, and of problems solved by both together, in eval episodes."""
    tasks = list(read_tasks(HERE / "held_out.jsonl"))[: arguments.held_out]

    def rates(task: Task) -> dict[str, float]:
        with begun(clients, arguments.samples, episode_type="eval") as groups:
            plans, solutions = outputs = run(task, groups)
            end(task, groups, outputs)
        return {
            "together": fmean(one.log_metrics["together"] for one in solutions),
            "planner": fmean(one.reward for one in plans),
            "solver": fmean(one.reward for one in solutions),
        }

    values = clients[0].run_episodes_until_all_complete(tasks, rates, max_workers=4)
    return measured(clients[0].get_global_step(), values)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the planner and the solver, and measure them.")
    parser.add_argument("--planner-url", default=PLANNER_URL)
    parser.add_argument("--solver-url", default=SOLVER_URL)
    add_options(parser, held_out="problems", samples="answers to", steps="training steps of each model")
    return parsed(parser)


def main() -> None:
    arguments = parsed_arguments()
    with SwarmClient(arguments.planner_url) as planner, SwarmClient(arguments.solver_url) as solver:
        clients = (planner, solver)
        for client in clients:
            client.wait_for_state(EngineState.ROLLING, wait_seconds=BOOT_SECONDS)
        first = planner.get_global_step()
        points = [held_out(clients, arguments)]
        for step in range(arguments.every, arguments.steps + arguments.every, arguments.every):
            learn(clients, first + min(step, arguments.steps), arguments)
            points.append(held_out(clients, arguments))
        model = planner.status().model
    keep(Curve(shuffled=arguments.shuffle_rewards, model=model, points=points), arguments.out)


if __name__ == "__main__":
    sys.exit(exit_code(main))
