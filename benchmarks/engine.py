"""A stand-in engine: "trains" each batch at once and serves :mod:`benchmarks.vllm`.

``python -m benchmarks.engine JOB.yaml``, started by the swarm server under measurement in place of the verl adapter.
Its costs are not the server's: its answers are precomputed bytes, and its process waits in between. ``STAND_IN_DELAY``
in the environment is the seconds that an answer takes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from benchmarks.vllm import MODEL, ChatServer
from swarm.http.serve import loop_factory
from swarm.job import TrainJob, parse_job
from tests.standins.engine import Engine


class Free(Engine):
    model = MODEL


async def main(job: TrainJob) -> None:
    ChatServer.delay = float(os.environ.get("STAND_IN_DELAY", "0"))
    server = await asyncio.get_running_loop().create_server(ChatServer, "127.0.0.1", 0)
    await asyncio.to_thread(Free(job, f"127.0.0.1:{server.sockets[0].getsockname()[1]}").run)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main(parse_job(Path(sys.argv[-1]).read_text())))
