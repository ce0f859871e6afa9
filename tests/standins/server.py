"""``swarm-gateway swarm start`` with a stand-in for the engine and short phases; prints its URL.

``python -m tests.standins.server KIND RUN_DIR PORT``: :mod:`tests.standins.engine` has the kinds.
"""

from __future__ import annotations

import sys
from pathlib import Path

from swarm.server.app import run
from swarm.server.config import ServerConfig
from tests.standins import engine

if __name__ == "__main__":
    kind, run_dir, port = sys.argv[1:]
    run(
        ServerConfig(port=int(port), run_dir=Path(run_dir), post_rolling_timeout=1.0, stop_grace=1.0),
        engine_command=engine.command(kind),
        on_ready=lambda url: print(f"listening on {url}", flush=True),
    )
