"""The loop: an episode per sentence and repetition, until the training steps are done.

python agent_roll.py --quick
python agent_roll.py --steps 32
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from agent_run import SWARM_URL, execute

from swarm.client import SwarmClient, auto_train_with_dataset
from swarm.data import read_tasks
from swarm.errors import SwarmGatewayError
from swarm.job import TrainJob

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the translation agent.")
    parser.add_argument("--swarm-url", default=SWARM_URL)
    parser.add_argument("--model", default="", help="another model than job.yaml's")
    parser.add_argument("--steps", type=int, default=32, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the sentences")
    parser.add_argument("--quick", action="store_true", help="2 steps")
    arguments = parser.parse_args()
    tasks = list(read_tasks(HERE / "sentences.jsonl"))
    random.Random(arguments.seed).shuffle(tasks)
    job = TrainJob.build_job_from_yaml(HERE / "job.yaml", **({"model": arguments.model} if arguments.model else {}))
    began = time.monotonic()
    try:
        with SwarmClient(arguments.swarm_url) as client:
            client.auto_sync_train_config_and_start_engine(job, force_restart=True)
            print(f"the engine is ready after {time.monotonic() - began:.0f} s", flush=True)
            steps = 2 if arguments.quick else arguments.steps
            report = auto_train_with_dataset(tasks, client, execute, epochs=1000, total_steps=steps)
    except SwarmGatewayError as exc:
        print(f"agent_roll: {exc.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(
        f"{report.last_step - report.first_step} steps, {report.finished} episodes, {report.failed} failed,"
        f" mean reward {report.mean_reward or 0:.3f}, {time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
