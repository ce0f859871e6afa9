"""The Ray cluster of one run: its own on one node, the operator's on several; and what it leaves behind.

Invariant: on one node a run never attaches to a cluster that it did not start, and never listens beyond loopback.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from adapters.verl.weights_socket import RUN_VARIABLE
from swarm.errors import ConfigError
from swarm.job import TrainJob

#: Ray puts sockets at ``<temp>/session_<date>_<pid>/sockets/plasma_store``; Unix allows 107 characters
MAX_TEMP_LENGTH = 36
#: tries to start a cluster
RAY_STARTS = 3
#: actors of one run, each of which asks Ray for one CPU that it does not use up
LOGICAL_CPUS = 32
#: names of segments that vLLM, verl and multiprocessing create in /dev/shm
SEGMENT_PREFIXES = ("psm_", "verl_weights_", "sem.mp-", "torch_")


def ray_temp_dir(run_dir: Path) -> Path:
    """The folder of Ray's sessions, reachable as ``run_dir/ray``; elsewhere if the path would be too long for a socket.

    Whoever cleans up after a killed run removes what ``run_dir/ray`` points to.
    """
    link = run_dir / "ray"
    if len(str(link)) <= MAX_TEMP_LENGTH:
        link.mkdir(parents=True, exist_ok=True)
        return link
    digest = hashlib.sha256(f"{run_dir.resolve()}{os.getpid()}".encode()).hexdigest()[:8]
    folder = Path(tempfile.gettempdir()) / f"swarm-ray-{digest}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    return folder


def init_arguments(
    job: TrainJob, device: Device, temp_dir: Path, environment: Mapping[str, str], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Keywords of ``ray.init``.

    Args:
        job: decides between one node and several.
        device: a CPU run lends Ray stand-ins for GPUs.
        temp_dir: from :func:`ray_temp_dir`.
        environment: variables for every process of the run.
        given: ``ray_kwargs.ray_init`` of verl's configuration; wins.

    Raises:
        ConfigError: several nodes without the address of a Ray cluster.
    """
    chosen = {key: value for key, value in given.items() if value is not None}
    runtime_env = {key: value for key, value in chosen.pop("runtime_env", {}).items() if value is not None}
    variables = {**environment, **runtime_env.pop("env_vars", {})}
    common: dict[str, Any] = {
        "runtime_env": {"env_vars": variables, **runtime_env},
        "log_to_driver": True,
        "configure_logging": True,
    }
    if job.nnodes > 1:
        address = os.environ.get("RAY_ADDRESS", "")
        if not address:
            raise ConfigError(
                "nnodes > 1 needs a running Ray cluster: start it with `ray start` on each node and set RAY_ADDRESS"
            )
        return {**common, "address": address, **chosen}
    local: dict[str, Any] = {
        "address": "local",
        "_temp_dir": str(temp_dir),
        "_node_ip_address": "127.0.0.1",
        "num_cpus": LOGICAL_CPUS,
        "include_dashboard": False,
    }
    if device == "cpu":
        local |= {"num_gpus": job.n_gpu, "object_store_memory": OBJECT_STORE_BYTES}
    return {**common, **local, **chosen}


def start_ray(arguments: dict[str, Any]) -> None:
    """``ray.init``, once more if Ray's own 30 s for its first process were not enough on a busy machine."""
    import ray

    for attempt in range(RAY_STARTS):
        try:
            ray.init(**arguments)
            return
        except Exception as exc:
            if "timed out during startup" not in str(exc) or attempt == RAY_STARTS - 1:
                raise
            ray.shutdown()


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
    found = psutil.Process().children(recursive=True)
    run = os.environ.get(RUN_VARIABLE)
    for process in psutil.process_iter() if run else ():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(RUN_VARIABLE) == run:
                found.append(process)
    return list(set(found))


def remove_leftovers(temp_dir: Path, since: float) -> None:
    """Remove Ray's sessions and the shared-memory segments of this run, once its processes are gone.

    Args:
        temp_dir: from :func:`ray_temp_dir`.
        since: when the run began, in epoch seconds.
    """
    shutil.rmtree(temp_dir, ignore_errors=True)
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return
    now = time.time()
    found = [path for path in shm.iterdir() if path.name.startswith(SEGMENT_PREFIXES) and is_leftover(path, since, now)]
    mapped = mapped_segments() if found else set()
    for path in found:
        if str(path) not in mapped:
            path.unlink(missing_ok=True)


def is_leftover(path: Path, since: float, now: float) -> bool:
    """Whether a segment may be of the run that began at ``since``: it is this user's and not older.

    A segment of the last second may be another run's that is about to map it.
    """
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    return stat.st_uid == os.getuid() and since <= stat.st_ctime < now - 1.0


def mapped_segments() -> set[str]:
    """Paths in /dev/shm that a living process has mapped."""
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:
            continue
        mapped.update(line.split(maxsplit=5)[5] for line in text.splitlines() if "/dev/shm/" in line)
    return mapped
