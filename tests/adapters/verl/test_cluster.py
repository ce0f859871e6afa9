"""The Ray cluster of a run and what it leaves behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

pytest.importorskip("adapters.verl.config", reason="needs the cpu or gpu extra")
from adapters.verl import cluster
from adapters.verl.meeting import RANKS_FOLDER, RUN_VARIABLE, private_handle
from swarm.errors import ConfigError
from swarm.job import TrainJob
from swarm.link import leftovers
from swarm.server.engine.supervisor import engine_environment
from tests.processes import alive


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = cluster.RayFolder(tmp_path)
    assert len(str(folder.path)) <= cluster.MAX_TEMP_LENGTH
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "ray").readlink() == folder.path
    (folder.path / "session").mkdir()
    folder.remove()
    assert not folder.path.exists() and not (tmp_path / "ray").is_symlink()


def test_a_long_folder_for_temporary_files_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 40)))
    folder = cluster.RayFolder(tmp_path)
    assert len(str(folder.path)) <= cluster.MAX_TEMP_LENGTH
    folder.remove()


def test_a_dying_run_leaves_its_successors_folder(tmp_path: Path) -> None:
    dying = cluster.RayFolder(tmp_path)
    successor = cluster.RayFolder(tmp_path)
    try:
        assert dying.path.exists(), "its driver lives"
        dying.remove()
        assert not dying.path.exists()
        assert (tmp_path / "ray").readlink() == successor.path and successor.path.is_dir()
    finally:
        successor.remove()


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    script = "import os, sys; from pathlib import Path; from adapters.verl.cluster import RayFolder\n"
    script += "print(RayFolder(Path(sys.argv[1])).path, flush=True); os._exit(1)"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    left = Path(done.stdout.strip())
    assert left.is_dir(), done.stderr
    folder = cluster.RayFolder(tmp_path)
    assert not left.exists()
    folder.remove()


def test_sockets_of_a_run_have_short_paths_wherever_temporary_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}/{'scratch' * 10}")
    folder = cluster.RayFolder(tmp_path)
    try:
        places = folder.meeting_places()
        assert set(places) == {"SWARM_RANKS_FOLDER", "VLLM_RPC_BASE_PATH"}
        assert all(len(f"{place}/{uuid.uuid4()}") <= 107 and Path(place).is_dir() for place in places.values())
    finally:
        folder.remove()


def test_a_link_to_something_else_costs_nothing_but_the_link(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "ray").symlink_to(tmp_path / "precious")
    cluster.RayFolder(tmp_path).remove()
    assert (tmp_path / "precious").is_dir()


def test_one_node_never_attaches_to_another_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    job = TrainJob(model="m")
    arguments = cluster.init_arguments(job, "cpu", tmp_path, {"A": "1"}, {"num_cpus": None, "runtime_env": {}})
    assert arguments["address"] == "local"
    assert arguments["_node_ip_address"] == "127.0.0.1"
    assert arguments["num_gpus"] == 1
    assert arguments["num_cpus"] >= cluster.LOGICAL_CPUS
    assert arguments["runtime_env"]["env_vars"] == {"A": "1"}
    assert "num_gpus" not in cluster.init_arguments(job, "cuda", tmp_path, {}, {})


def test_several_nodes_use_the_operators_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = TrainJob(model="m", nnodes=2)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    arguments = cluster.init_arguments(job, "cuda", tmp_path, {}, {})
    assert arguments["address"] == "10.0.0.1:6379"
    assert "_temp_dir" not in arguments
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ConfigError, match="RAY_ADDRESS"):
        cluster.init_arguments(job, "cuda", tmp_path, {}, {})


def test_given_ray_keywords_win(tmp_path: Path) -> None:
    given = {"num_cpus": 4, "runtime_env": {"env_vars": {"A": "2"}, "py_executable": None}}
    arguments = cluster.init_arguments(TrainJob(model="m"), "cpu", tmp_path, {"A": "1", "B": "1"}, given)
    assert arguments["num_cpus"] == 4
    assert arguments["runtime_env"] == {"env_vars": {"A": "2", "B": "1"}}


@pytest.fixture
def tracked() -> Iterator[None]:
    """Of what a test kills, this process needs its tracker of shared memory again."""
    yield
    with warnings.catch_warnings(action="ignore"):
        resource_tracker.ensure_running()


@pytest.mark.usefixtures("tracked")
def test_descendants_that_ignore_sigterm_are_killed() -> None:
    stubborn = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        cluster.kill_processes(grace=0.2)
        assert not psutil.pid_exists(child.pid) or child.wait(timeout=5) == -9


@pytest.mark.usefixtures("tracked")
def test_orphans_are_known_by_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = (
        "[sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    )
    orphan = f"import subprocess, sys; print(subprocess.Popen({sleeper}).pid)"
    monkeypatch.setenv(cluster.RUN_VARIABLE, f"test-{os.getpid()}")
    done = subprocess.run([sys.executable, "-c", orphan], capture_output=True, text=True, check=True)
    pid = int(done.stdout)
    assert pid in {process.pid for process in cluster.run_processes()}
    cluster.kill_processes(grace=2.0)
    assert not alive(pid)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory file system")
def test_only_orphaned_segments_of_this_run_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shm, folder = Path("/dev/shm"), cluster.RayFolder(tmp_path)
    # an engine that ends beside this test removes what nobody holds of the usual names
    own = f"test-{os.getpid()}-"
    monkeypatch.setattr(leftovers, "SEGMENT_PREFIXES", (*leftovers.SEGMENT_PREFIXES, own))
    orphan, usual, unrelated = shm / f"{own}orphan", shm / f"psm_orphan{os.getpid()}", shm / f"unrelated{os.getpid()}"
    mapped = SharedMemory(create=True, size=4096)
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    held = shm / f"sem.{semaphore._semlock.name.lstrip('/')}"
    began = time.time() - 1.0
    try:
        for path in (orphan, usual, unrelated):
            path.write_bytes(b"x")
        cluster.remove_leftovers(folder, since=began)
        assert orphan.exists(), "perhaps about to be mapped"
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 5.0)
        cluster.remove_leftovers(folder, since=now + 1.0)
        assert orphan.exists(), "older than the run"
        cluster.remove_leftovers(folder, since=began)
        assert not orphan.exists() and not usual.exists()
        assert held.exists() and (shm / mapped.name).exists() and unrelated.exists()
        assert not folder.path.exists()
    finally:
        mapped.unlink()
        mapped.close()
        for path in (orphan, usual, unrelated):
            path.unlink(missing_ok=True)


# as the driver does it, in a checkout that holds other versions of the packages
RAY = """
import json, os, sys
from pathlib import Path
from adapters.verl import cluster
from adapters.verl.meeting import RANKS_FOLDER, RUN_VARIABLE, private_handle
from swarm.job import TrainJob
from swarm.link.imported import imported, top_level

run_dir, code = Path(sys.argv[1]), Path(sys.argv[2])
here = os.getcwd()
folder = cluster.RayFolder(run_dir)
variables = {"PYTHONPATH": os.environ["PYTHONPATH"], "RAY_enable_worker_prestart": "0"}
cluster.start_ray(cluster.init_arguments(TrainJob(model="m"), "cpu", folder.path, variables, {}), folder.path)
import ray
def ask():
    import my_code
    files = imported(top_level(code), code).locations
    return {"files": files, "cwd": os.getcwd(), "name": my_code.NAME, "path": sys.path}
try:
    assert os.getcwd() == here
    driver = {who: one.locations for who, one in cluster.code_imported(code).items()}
    told = {"driver": driver, "worker": ray.get(ray.remote(num_cpus=0)(ask).remote())}
finally:
    ray.shutdown()
    folder.remove()
print(json.dumps(told))
"""


@pytest.mark.slow
def test_a_rays_worker_imports_synced_code_and_keeps_the_working_directory(tmp_path: Path) -> None:
    checkout, code = tmp_path / "checkout", tmp_path / "code"
    for folder, packages in ((checkout, ("my_code", "adapters", "swarm")), (code, ("my_code",))):
        for package in packages:
            (folder / package).mkdir(parents=True)
            (folder / package / "__init__.py").write_text(f"NAME = {folder.name!r}")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    environ = engine_environment("tcp://127.0.0.1:1", "none", run_dir, code)
    done = subprocess.run(
        [sys.executable, "-c", RAY, str(run_dir), str(code)],
        cwd=checkout,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    ours = {"my_code": str(code / "my_code/__init__.py")}
    assert told["driver"] == {"the driver": ours}
    assert told["worker"].pop("path").count(str(checkout)) == 0
    # relative paths in a job start from where the server was started, in each process
    assert told["worker"] == {"files": ours, "cwd": str(checkout), "name": "code"}


# the reservations of verl and of its TransferQueue, without their processes
RESERVED = """
import os, sys
from pathlib import Path
from adapters.verl import cluster
from adapters.verl.meeting import RANKS_FOLDER, RUN_VARIABLE, private_handle
from adapters.verl.config import verl_config
from swarm.job import TrainJob

run_dir = Path(sys.argv[1])
job = TrainJob(model="m", n_gpu=8)
units = verl_config(job, "m", run_dir, "cuda").transfer_queue.backend.SimpleStorage.num_data_storage_units
folder = cluster.RayFolder(run_dir)
cluster.start_ray(cluster.init_arguments(job, "cpu", folder.path, dict(os.environ), {}), folder.path)
import ray
from ray.util import placement_group
from verl.single_controller.ray import ResourcePoolManager
try:
    # the trainer, the queue's controller, its storage units, and a server of vLLM as it starts
    actors = placement_group([{"CPU": 1}] * (units + 3))
    workers = placement_group(
        [{"CPU": ResourcePoolManager.max_colocate_count, "GPU": 1}] * job.n_gpu, strategy="STRICT_PACK"
    )
    print(actors.wait(120), workers.wait(120))
finally:
    ray.shutdown()
    folder.remove()
"""


@pytest.mark.slow
def test_a_machine_of_eight_gpus_has_room_for_all_actors(tmp_path: Path) -> None:
    variables = {**os.environ, "RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
    command = [sys.executable, "-c", RESERVED, str(tmp_path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True True"


def test_weights_travel_on_a_socket_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_VARIABLE, "1234abcd")
    monkeypatch.delenv(RANKS_FOLDER, raising=False)
    assert private_handle("ipc:///tmp/rl-colocate-0.sock") == "ipc:///tmp/swarm-1234abcd-rl-colocate-0.sock"
    # on one machine it goes with the folder of the run
    monkeypatch.setenv(RANKS_FOLDER, "/tmp/swarm-ray-12345678")
    assert private_handle("ipc:///tmp/rl-colocate-0.sock") == "ipc:///tmp/swarm-ray-12345678/rl-colocate-0.sock"
