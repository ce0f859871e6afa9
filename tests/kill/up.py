"""``swarm-gateway``, whose ``up`` starts the real servers with the stand-in engine ``$STANDIN_ENGINE``."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import wraps
from typing import Any

import gateway.launch.up as launch
from gateway.cli import main
from gateway.launch.plan import UpPlan

ENGINE_VARIABLE = "STANDIN_ENGINE"

if __name__ == "__main__":
    run_up = launch.run_up

    @wraps(run_up)
    def with_standin(plan: UpPlan, *args: Any) -> None:
        command = (sys.executable, "-m", "tests.gateway.scripted_up", os.environ[ENGINE_VARIABLE])
        run_up(replace(plan, command=command), *args)

    launch.run_up = with_standin
    main()
