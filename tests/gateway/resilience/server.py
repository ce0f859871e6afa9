"""The swarm server of the resilience tests: ``swarm-gateway swarm start`` with their engine; prints its URL.

``python -m tests.gateway.resilience.server RUN_DIR PORT``
"""

from __future__ import annotations

import sys
from pathlib import Path

from swarm.server.config import ServerConfig
from swarm.server.run import run
from tests.standins import engine

if __name__ == "__main__":
    run(
        ServerConfig(port=int(sys.argv[2]), run_dir=Path(sys.argv[1]), post_rolling_timeout=1.0, stop_grace=1.0),
        engine_command=engine.command("paced"),
        on_ready=lambda url: print(url, flush=True),
    )
