"""The swarm server of the client suite: ``swarm-gateway swarm start`` with the suite's engine; prints its URL."""

from __future__ import annotations

import sys
from pathlib import Path

from swarm.server.config import ServerConfig
from swarm.server.run import run
from tests.standins import engine

if __name__ == "__main__":
    run(
        ServerConfig(port=0, run_dir=Path(sys.argv[1])),
        engine_command=engine.command("clients"),
        on_ready=lambda url: print(f"listening on {url}", flush=True),
    )
