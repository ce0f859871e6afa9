"""The Ray cluster of one run: its own on one node, the operator's on several; and what it leaves behind.

Invariant: on one node a run never attaches to a cluster that it did not start, and never listens beyond loopback.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from adapters.verl.config import Device
from adapters.verl.cpu import OBJECT_STORE_BYTES
from adapters.verl.machine import cluster_address
from adapters.verl.meeting import RANKS_FOLDER, RUN_VARIABLE
from swarm.job import TrainJob
from swarm.link.imported import ImportedCode, imported, top_level
from swarm.link.leftovers import PREFIX, hold, remove_ray_folder, remove_segments

#: Ray puts sockets at ``<temp>/ray/session_<date>_<pid>/sockets/plasma_store``; Unix allows 107 characters
MAX_TEMP_LENGTH = 32
#: tries to start a cluster
RAY_STARTS = 3
#: actors of one run, each of which asks Ray for one CPU that it does not use up; and the CPUs that verl reserves beside
#: each accelerator
LOGICAL_CPUS, WORKER_CPUS = 32, 3


class RayFolder:
    """A new folder for the sessions of one run's Ray, reachable as ``run_dir/ray``.

    Each run has its own, because a dying run may remove its folder when its successor has begun. Whoever cleans up
    after a killed run removes what ``run_dir/ray`` points to. The folder of a predecessor that was killed together with
    whoever cleans up is removed here.

    Attributes:
        path: holds Ray's sessions; short enough for sockets and for this user only.
    """

    def __init__(self, run_dir: Path) -> None:
        parent = tempfile.gettempdir()
        if len(parent) + len("/swarm-ray-xxxxxxxx") > MAX_TEMP_LENGTH:
            parent = "/tmp"
        self._link = run_dir / "ray"
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # the lock says that the run lives, and goes with its process
        self._lock = hold(self.path)
        remove_ray_folder(self._link)
        # of a run that lives, perhaps, which has another one
        self._link.unlink(missing_ok=True)
        self._link.symlink_to(self.path)

    def meeting_places(self) -> dict[str, str]:
        """The variables by which the processes of a run on one machine meet here: vLLM's sockets, too, are otherwise
        where temporary files are, though their path may have 107 characters."""
        return dict.fromkeys((RANKS_FOLDER, "VLLM_RPC_BASE_PATH"), str(self.path))

    def remove(self) -> None:
        """Remove the folder, and ``run_dir/ray`` unless it is a successor's by now."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            if self._link.readlink() == self.path:
                self._link.unlink()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def init_arguments(
    job: TrainJob, device: Device, temp_dir: Path, environment: Mapping[str, str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Keywords of ``ray.init``, for every process of a run to have ``environment``; ``settings``, which verl's
    configuration has as ``ray_kwargs.ray_init``, win.

    Raises:
        ConfigError: several nodes without the address of a Ray cluster.
    """
    chosen = {key: value for key, value in settings.items() if value is not None}
    runtime_env = {key: value for key, value in chosen.pop("runtime_env", {}).items() if value is not None}
    variables = {**environment, **runtime_env.pop("env_vars", {})}
    common: dict[str, Any] = {
        "runtime_env": {"env_vars": variables, **runtime_env},
        "log_to_driver": True,
        "configure_logging": True,
    }
    if job.nnodes > 1:
        return {**common, "address": cluster_address(), **chosen}
    local: dict[str, Any] = {
        "address": "local",
        # Ray opens its own folder to everybody
        "_temp_dir": str(temp_dir / "ray"),
        "_node_ip_address": "127.0.0.1",
        "num_cpus": LOGICAL_CPUS + WORKER_CPUS * job.n_gpu,
        "include_dashboard": False,
    }
    if device == "cpu":
        # stand-ins
        local |= {"num_gpus": job.n_gpu, "object_store_memory": OBJECT_STORE_BYTES}
    return {**common, **local, **chosen}


def start_ray(arguments: dict[str, Any], folder: Path) -> None:
    """``ray.init``, once more if Ray's own 30 s for its first process were not enough on a busy machine.

    Ray puts the directory in which it is started in front of the path of its workers, where a checkout would go before
    synced code. So it is started in ``folder``, and its workers go back to our working directory.
    """
    import ray

    here = os.getcwd()

    def go_back() -> None:
        os.chdir(here)

    if arguments["address"] == "local":
        arguments = {**arguments, "runtime_env": {"worker_process_setup_hook": go_back, **arguments["runtime_env"]}}
    os.chdir(folder)
    try:
        for attempt in range(RAY_STARTS):
            try:
                ray.init(**arguments)
                return
            except Exception as exc:
                if "timed out during startup" not in str(exc) or attempt == RAY_STARTS - 1:
                    raise
                ray.shutdown()
    finally:
        go_back()


def code_imported(folder: Path) -> dict[str, ImportedCode]:
    """What this process and a worker on each other node import of the code in ``folder``; needs a started Ray."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    names = top_level(folder)
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    ask = ray.remote(num_cpus=0)(imported)
    answers = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            names, folder
        )
        for node in others
    ]
    codes = zip(others, ray.get(answers), strict=True)
    return {"the driver": imported(names, folder)} | {
        f"a Ray worker on {node['NodeManagerAddress']}": code for node, code in codes
    }


def kill_processes(grace: float = 5.0) -> None:
    """End every other process of this run: politely, then, after ``grace`` seconds, by force."""
    victims = run_processes()
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.terminate()
    _, alive = psutil.wait_procs(victims, timeout=grace)
    for victim in alive:
        with contextlib.suppress(psutil.Error):
            victim.kill()
    psutil.wait_procs(alive, timeout=grace)


def run_processes() -> list[psutil.Process]:
    """The descendants of this process, and the run's processes whose parent is gone, known by their environment."""
    processes = psutil.Process().children(recursive=True)
    run = os.environ.get(RUN_VARIABLE)
    for process in psutil.process_iter() if run else ():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(RUN_VARIABLE) == run:
                processes.append(process)
    return list(set(processes))


def remove_leftovers(folder: RayFolder, since: float) -> None:
    """Remove Ray's sessions and the shared-memory segments of a run that began at ``since``, in epoch seconds, once its
    processes are gone."""
    folder.remove()
    # a segment of the last second may be another run's that is about to map it
    remove_segments(since, before=time.time() - 1.0)
