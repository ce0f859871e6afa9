"""A process that writes a journal as fast as it can and prints the name of each change that it was told is on disk.

``python -m tests.swarm.server.journal.writing JOURNAL PREFIX``; it ends when it is killed. Names are ``claim NAME``,
``end NAME``, ``step BATCH_ID``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import RunRow
from swarm.tokens import TrainBatch, TrainGroup, Trajectory
from tests.swarm.server.journal.build import call, claimed, ended, stepped, taken


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


async def run(path: Path, prefix: str) -> None:
    journal = Journal.open(path, keep_episodes=100_000)
    finished: list[Trajectory] = [one for _, one in journal.recover().finished]
    outstanding = journal.recover().outstanding
    batches = 0
    journal.append(RunRow("r", ""))

    async def client(number: int) -> None:
        for turn in range(1_000_000):
            name = f"{prefix}-{number}-{turn}"
            journal.append(claimed(name))
            await journal.synced()
            say(f"claim {name}")
            end = ended(name, tokens=40)
            journal.append(call(name, "1"), end)
            assert end.trajectory is not None
            finished.append(end.trajectory)
            await journal.synced()
            say(f"end {name}")

    async def trainer() -> None:
        nonlocal batches
        if outstanding is not None:
            journal.append(*stepped(outstanding.batch))
            await journal.synced()
            say(f"step {outstanding.batch.batch_id}")
        while True:
            while len(finished) < 32:
                await journal.synced()
                await asyncio.sleep(0)
            batches += 1
            chosen, finished[:] = finished[:32], finished[32:]
            batch_id = f"{prefix}-b{batches}"
            batch = TrainBatch(batch_id=batch_id, groups=[TrainGroup(task_id="t", trajectories=chosen)])
            journal.append(*taken(batch))
            await journal.synced()
            journal.append(*stepped(batch))
            await journal.synced()
            say(f"step {batch_id}")

    async with asyncio.TaskGroup() as group:
        group.create_task(trainer())
        for number in range(16):
            group.create_task(client(number))


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2]))
