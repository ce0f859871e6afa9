"""The path of the socket between trainer and vLLM, made unique per run.

verl puts the Ray job id into it, but the first job of every local Ray cluster has the same id: two runs on one machine
would hand each other their weights.
"""

from __future__ import annotations

import os

RUN_VARIABLE = "SWARM_RUN_ID"


def private_handle(handle: str) -> str:
    """verl's ``ipc://`` handle with the id of this run in its file name."""
    folder, _, name = handle.rpartition("/")
    return f"{folder}/swarm-{os.environ[RUN_VARIABLE]}-{name}"
