"""The Ray cluster of a run and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("adapters.verl.config", reason="needs the cpu or gpu extra")
from adapters.verl import cluster
from swarm.errors import ConfigError
from swarm.job import TrainJob


def test_short_run_folder_holds_rays_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "MAX_TEMP_LENGTH", len(str(tmp_path / "ray")))
    assert cluster.ray_temp_dir(tmp_path) == tmp_path / "ray"
    assert (tmp_path / "ray").is_dir()


def test_long_run_folder_points_to_a_short_one(tmp_path: Path) -> None:
    run = tmp_path / ("x" * 80)
    run.mkdir()
    folder = cluster.ray_temp_dir(run)
    try:
        assert len(str(folder)) <= cluster.MAX_TEMP_LENGTH
        assert (run / "ray").resolve() == folder.resolve()
        assert cluster.ray_temp_dir(run) == folder
        cluster.remove_leftovers(folder, since=time.time())
        assert not folder.exists()
    finally:
        if folder.exists():
            folder.rmdir()


def test_one_node_never_attaches_to_another_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    job = TrainJob(model="m")
    arguments = cluster.init_arguments(job, "cpu", tmp_path, {"A": "1"}, {"num_cpus": None, "runtime_env": {}})
    assert arguments["address"] == "local"
    assert arguments["_node_ip_address"] == "127.0.0.1"
    assert arguments["num_gpus"] == 1
    assert arguments["num_cpus"] == cluster.LOGICAL_CPUS
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


def test_descendants_that_ignore_sigterm_are_killed() -> None:
    stubborn = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        cluster.kill_processes(grace=0.2)
        assert not psutil.pid_exists(child.pid) or child.wait(timeout=5) == -9


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
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory file system")
def test_only_orphaned_segments_of_this_run_are_removed(tmp_path: Path) -> None:
    from multiprocessing.shared_memory import SharedMemory

    shm = Path("/dev/shm")
    old, other = shm / f"psm_old{os.getpid()}", shm / f"unrelated{os.getpid()}"
    orphan = shm / f"psm_orphan{os.getpid()}"
    mapped = SharedMemory(name=f"psm_mapped{os.getpid()}", create=True, size=4096)
    try:
        for path in (old, other, orphan):
            path.write_bytes(b"x")
        now = time.time()
        os.utime(old)
        assert cluster.is_leftover(orphan, since=now - 60, now=now + 5)
        assert not cluster.is_leftover(old, since=now + 1, now=now + 5), "older than the run"
        assert not cluster.is_leftover(orphan, since=now - 60, now=now), "perhaps about to be mapped"
        assert str(shm / mapped.name) in cluster.mapped_segments()
        assert str(orphan) not in cluster.mapped_segments()
    finally:
        mapped.close()
        mapped.unlink()
        for path in (old, other, orphan):
            path.unlink(missing_ok=True)
