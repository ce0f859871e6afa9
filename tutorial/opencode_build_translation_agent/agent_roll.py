"""The loop: an episode per sentence and repetition, until the training steps are done.

python agent_roll.py --quick
python agent_roll.py --steps 32
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from agent_run import SWARM_URL, execute

from swarm.client import auto_train_with_dataset
from swarm.data import read_tasks
from swarm.job import read_job

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.rolling import exit_code, started  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the translation agent.")
    parser.add_argument("--swarm-url", default=SWARM_URL)
    parser.add_argument("--model", default="", help="another model than job.yaml's")
    parser.add_argument("--steps", type=int, default=32, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the sentences")
    parser.add_argument("--quick", action="store_true", help="2 steps")
    arguments = parser.parse_args()
    tasks = list(read_tasks(HERE / "sentences.jsonl"))
    random.Random(arguments.seed).shuffle(tasks)
    job = read_job(HERE / "job.yaml", **({"model": arguments.model} if arguments.model else {}))
    with started(arguments.swarm_url, job) as client:
        steps = 2 if arguments.quick else arguments.steps
        report = auto_train_with_dataset(tasks, client, execute, epochs=1000, total_steps=steps)
    print(
        f"{report.last_step - report.first_step} steps, {report.finished} episodes, {report.failed} failed,"
        f" mean reward {report.mean_reward or 0:.3f}"
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
