"""Where the processes of one run meet: the socket between trainer and vLLM, and the file of the trainer's ranks. On one
machine both are in the folder of the run's Ray, which goes with the run.

verl puts the Ray job id into the socket's path, but the first job of every local Ray cluster has the same id: two runs
on one machine would hand each other their weights.
"""

from __future__ import annotations

import os

RUN_VARIABLE = "SWARM_RUN_ID"
#: the variable with the folder of both, in a run on one machine
RANKS_FOLDER = "SWARM_RANKS_FOLDER"


def private_handle(handle: str) -> str:
    """verl's ``ipc://`` handle, in the folder of this run or with the run's id in its file name."""
    folder, _, name = handle.rpartition("/")
    if run_folder := os.environ.get(RANKS_FOLDER):
        # who dies while weights are sent leaves the socket there
        return f"ipc://{run_folder}/{name}"
    return f"{folder}/swarm-{os.environ[RUN_VARIABLE]}-{name}"


def meet_in_a_file() -> None:
    """Have the ranks of a trainer on one machine meet in a file: torch's store would listen on all addresses.

    verl gives each trainer another prefix, so none finds the file of one that died.
    """
    if folder := os.environ.get(RANKS_FOLDER):
        os.environ["DIST_INIT_METHOD"] = f"file://{folder}/ranks-{os.environ['WG_PREFIX']}"
