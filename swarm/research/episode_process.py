"""The two processes that run a study's episodes: ``train`` with an experiment's code, ``evaluate`` with the locked one.

Invariant: they share no memory and no imports, so that what is trained cannot reach the evaluator; each ends with the
process that started it. They read JSON lines from stdin and write them to stdout; what user code prints goes to stderr.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from pathlib import Path
from statistics import fmean
from typing import Any

from swarm.client import SwarmClient
from swarm.client.training import TrainOptions, begin_training
from swarm.client.training_options import Evaluation
from swarm.client.workflow import find_workflow
from swarm.data import epochs_of, located, read_tasks
from swarm.errors import ConfigError
from swarm.research.study import Study
from swarm.types import Model, Task

#: Episodes of an evaluation that run at once.
_MOST = 32


class EpisodeOrder(Model):
    """What both processes get: ``folder`` holds the code, and relative paths start there; ``settings``, ``seed`` and
    ``shuffle`` are of the run that is trained."""

    study: Study
    server: str
    token: str | None
    folder: str
    settings: dict[str, Any]
    seed: int
    shuffle: bool


class Wires:
    """The first process's end of stdin and stdout, taken away from user code."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        self._in = os.fdopen(os.dup(0), "r")
        os.dup2(2, 1)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        self.order = self._in.readline()
        self._answers = threading.Semaphore(0)
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, **values: Any) -> None:
        self._out.write(json.dumps(values) + "\n")

    def wait(self) -> None:
        """Until the next line comes; a dead first process ends this one."""
        self._answers.acquire()

    def _listen(self) -> None:
        for _ in self._in:
            self._answers.release()
        os._exit(3)


def train(order: EpisodeOrder, wires: Wires) -> None:
    """Train until the job's last step; before each evaluation tell so, and wait."""

    def due() -> list[Task]:
        # by now no train episode is begun
        wires.tell(due=True)
        wires.wait()
        return []

    execute = find_workflow(order.study.workflow, order.settings)
    with SwarmClient(order.server, token=order.token) as client:
        status = client.status()
        assert status.job is not None, "the engine was started with one"
        source = located(order.study.tasks, Path(order.folder))
        # a run that goes on does not begin its tasks anew
        done = status.engine.global_step * status.job.batch_size
        tasks = itertools.islice(epochs_of(source, order.seed), done, None)
        options = TrainOptions(
            evaluation=Evaluation(due, order.study.evaluator.every_steps), shuffle_rewards=order.shuffle
        )
        begin_training(tasks, client, execute, options).result()


def evaluate(order: EpisodeOrder, wires: Wires) -> None:
    """Tell the score of each held-out task: the mean over its episodes."""
    evaluator = order.study.evaluator
    execute = find_workflow(evaluator.workflow)
    tasks = list(read_tasks(located(evaluator.tasks, Path(order.folder))))
    if not tasks:
        raise ConfigError(f"{evaluator.tasks} holds no task")

    with SwarmClient(order.server, token=order.token) as client:

        def score(task: Task) -> float:
            uuid, api = client.begin_episode(episode_type="eval")
            output = execute(task, api)
            client.end_episode(task, uuid, output)
            if evaluator.metric == "reward":
                return output.reward
            if evaluator.metric not in output.log_metrics:
                raise ConfigError(f"{evaluator.workflow} logs no {evaluator.metric!r}")
            return output.log_metrics[evaluator.metric]

        wanted = [task for task in tasks for _ in range(evaluator.samples)]
        values = client.run_episodes_until_all_complete(wanted, score, min(_MOST, len(wanted)))
    measured = [value for value in values if value is not None]
    if len(measured) < len(wanted):
        raise ConfigError(f"{len(wanted) - len(measured)} of {len(wanted)} evaluation episodes failed")
    samples = evaluator.samples
    wires.tell(scores=[fmean(measured[at : at + samples]) for at in range(0, len(measured), samples)])


def main(what: str) -> None:
    wires = Wires()
    order = EpisodeOrder.model_validate_json(wires.order)
    sys.path.insert(0, order.folder)
    try:
        (train if what == "train" else evaluate)(order, wires)
    except Exception as exc:
        first = exc.exceptions[0] if isinstance(exc, ExceptionGroup) else exc
        wires.tell(failed=f"{type(first).__name__}: {first}")
        raise


if __name__ == "__main__":
    main(sys.argv[1])
