"""A stand-in engine: speaks the real link, "trains" each batch at once, and serves :mod:`benchmarks.vllm`.

``python -m benchmarks.engine JOB.yaml``, started by the swarm server under measurement in place of the verl adapter.
What it costs is not the server's: its answers are precomputed bytes, and its process waits in between. In the
environment, ``STAND_IN_DELAY`` says how many seconds an answer takes.
"""

from __future__ import annotations

import asyncio
import os

from benchmarks.vllm import MODEL, ChatServer
from swarm.http.serve import loop_factory
from swarm.link.batches import BatchRequests
from swarm.link.engine import EngineEnd
from swarm.link.messages import BatchReady, Finished, Stop


async def main() -> None:
    ChatServer.delay = float(os.environ.get("STAND_IN_DELAY", "0"))
    server = await asyncio.get_running_loop().create_server(ChatServer, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def die() -> None:
        os._exit(1)

    with (
        EngineEnd.from_environment("driver", on_lost=die) as driver,
        EngineEnd.from_environment("rollout", on_lost=die) as rollout,
    ):
        await asyncio.to_thread(train, address, MODEL, driver, rollout)


def train(address: str, model: str, driver: EngineEnd, rollout: EngineEnd) -> None:
    """A step per batch until the server says Stop; ``address`` serves ``model``."""
    version = 0
    requests = BatchRequests(rollout)
    requests.ask([address], model, version, version + 1)
    while True:
        match rollout.receive(timeout=1.0):
            case BatchReady() as message if requests.take(message):
                version += 1
                requests.report(version, {})
                requests.ask([address], model, version, version + 1)
            case Stop():
                driver.send(Finished())
                return
            case _:
                pass


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())
