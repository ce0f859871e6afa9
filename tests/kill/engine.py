"""The engine of the kill test: speaks the real link, and writes down what it trains.

``python -m tests.kill.engine JOB.yaml``; appends to ``$KILL_FOLDER/engine.jsonl``:

* ``{"started": pid, "version": v}``
* ``{"trained": batch_id, "step": n, "episodes": {uuid: reward}}``: an attempt, before the server is told of it.
* ``{"recorded": batch_id}``: the server gave another batch afterwards, which it does only once it has recorded the
  step. Of the last step before a kill the engine cannot know: it gets the same batch again unless the server has it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.vllm import MODEL, ChatServer
from swarm.link.batches import BatchRequests
from swarm.link.engine import ADDRESS_VARIABLE, TOKEN_VARIABLE, EngineEnd
from swarm.link.messages import BatchReady, BootProgress, Finished, Message, RolloutReady, Stop
from swarm.tokens import TrainBatch

#: a killed server's engine leaves soon, so that not many are there at a time
_SERVER_TIMEOUT = 4.0


class Log:
    """Lines that survive the process: each is one write to a file opened for appending."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **fields: Any) -> None:
        os.write(self._file, json.dumps(fields).encode() + b"\n")


class Chat(ChatServer):
    """Short answers."""

    tokens = 6


async def main() -> None:
    folder = Path(os.environ["KILL_FOLDER"])
    server = await asyncio.get_running_loop().create_server(Chat, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    link, token = os.environ[ADDRESS_VARIABLE], os.environ[TOKEN_VARIABLE]

    def die() -> None:
        os._exit(1)

    with (
        EngineEnd("driver", link, token, server_timeout=_SERVER_TIMEOUT, on_lost=die) as driver,
        EngineEnd("rollout", link, token, server_timeout=_SERVER_TIMEOUT, on_lost=die) as rollout,
    ):
        await asyncio.to_thread(train, folder, address, driver, rollout)


def train(folder: Path, address: str, driver: EngineEnd, rollout: EngineEnd) -> None:
    """A step per batch, of random length, with the weights' version kept like a checkpoint."""
    checkpoint = folder / "checkpoint"
    version = int(checkpoint.read_text()) if checkpoint.exists() else 0
    log = Log(folder / "engine.jsonl")
    log.write(started=os.getpid(), version=version)
    driver.send(BootProgress(stage="booting"))
    link = Stuttering(rollout)
    requests = BatchRequests(link)
    requests.ask([address], MODEL, version, version + 1)
    told = ""
    while True:
        match rollout.receive(timeout=1.0):
            case BatchReady() as message if batch := requests.take(message):
                link.stutter()
                if told and told != batch.batch_id:
                    log.write(recorded=told)
                time.sleep(random.uniform(0.0, 0.1))
                version += 1
                log.write(trained=batch.batch_id, step=version, episodes=rewards(batch))
                beside = checkpoint.with_suffix(".new")
                beside.write_text(str(version))
                beside.replace(checkpoint)
                time.sleep(random.uniform(0.0, 0.05))
                requests.report(version, {})
                told = batch.batch_id
                link.stutter()
                time.sleep(random.uniform(0.0, 0.05))
                requests.ask([address], MODEL, version, version + 1)
            case Stop():
                driver.send(Finished())
                return
            case _:
                pass


class Stuttering:
    """The engine's end of the link; now and then it sends its last request once more, too late."""

    def __init__(self, end: EngineEnd) -> None:
        self._end = end
        self._asked: RolloutReady | None = None

    def send(self, message: Message) -> None:
        if isinstance(message, RolloutReady):
            self._asked = message
        self._end.send(message)

    def stutter(self) -> None:
        if self._asked is not None and random.random() < 0.3:
            self._end.send(self._asked)


def rewards(batch: TrainBatch) -> dict[str, float]:
    return {one.episode_uuid: one.reward for group in batch.groups for one in group.trajectories}


if __name__ == "__main__":
    asyncio.run(main())
