"""One process of the cocktail: runs the episodes of one agent and takes its share of every batch.

    python worker.py sums --share 0.4

It goes on until it is stopped, in whatever way (what it leaves behind is given up by the server), or the engine is.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from swarm.client import SwarmClient
from swarm.data import read_tasks
from swarm.errors import SwarmGatewayError
from swarm.importer import SourceFolder
from swarm.states import EngineState
from swarm.types import Task

HERE = Path(__file__).resolve().parent
SWARM_URL = os.environ.get("SWARM_URL", "http://127.0.0.1:10086")
#: the agents of two other tutorials, with their tasks
AGENTS = {
    "sums": HERE.parent / "opencode_build_math_agent" / "train.jsonl",
    "translation": HERE.parent / "opencode_build_translation_agent" / "sentences.jsonl",
}
IDLE_SECONDS = 15.0  # without a model call, an episode is given to somebody else: this process may have died
AT_ONCE = 8  # episodes


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the episodes of one agent.")
    parser.add_argument("agent", choices=AGENTS)
    parser.add_argument("--share", type=float, required=True, help="of every batch, e.g. 0.4")
    parser.add_argument("--swarm-url", default=SWARM_URL)
    arguments = parser.parse_args()
    execute = SourceFolder(AGENTS[arguments.agent].parent).module("agent_run").execute
    tasks = list(read_tasks(AGENTS[arguments.agent]))
    random.shuffle(tasks)  # a process that comes back does not begin with the same ones
    try:
        with SwarmClient(arguments.swarm_url, client_uuid=arguments.agent) as client:
            job = client.status().job
            assert job is not None

            def episode(task: Task) -> None:
                share = {"ratio": arguments.share, "current_task_id": task.task_id}
                with client.episode(IDLE_SECONDS, throttle_policy=share) as one:
                    one.end(task, execute(task, one.endpoint))

            def repeated() -> Iterator[Task]:
                for task in itertools.cycle(tasks):
                    if client.get_engine_status().engine_status == EngineState.OFFLINE:
                        return
                    yield from itertools.repeat(task, job.num_repeat)

            client.run_episodes_until_all_complete(repeated(), episode, AT_ONCE)
    except SwarmGatewayError as exc:
        print(f"{arguments.agent}: {exc.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
