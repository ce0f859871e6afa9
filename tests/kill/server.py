"""The server of the kill test: ``swarm-gateway swarm start`` with the engine of the kill test; prints its URL."""

from __future__ import annotations

import sys
from pathlib import Path

from swarm.server.app import run
from swarm.server.config import ServerConfig
from tests.standins import engine

if __name__ == "__main__":
    run(
        # short phases: more of them between two kills
        ServerConfig(port=0, run_dir=Path(sys.argv[1]), post_rolling_timeout=1.0, stop_grace=1.0, allow_code_sync=True),
        engine_command=engine.command("recording"),
        on_ready=lambda url: print(url, flush=True),
    )
