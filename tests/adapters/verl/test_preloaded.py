"""A fork behaves as the Python process that it stands for."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from adapters.verl.preloaded import start_preloading

#: seconds
PATIENCE = 60
TOLD = """
import json, os, sys
told = {"argv": sys.argv[1:], "name": __name__, "folder": os.getcwd(), "variable": os.environ.get("TOLD"),
        "others": os.environ.get("OTHERS"), "preloaded": "wave" in sys.modules, "parent": os.getppid()}
print(json.dumps(told), flush=True)
"""


@pytest.fixture
def preloaded(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, int]]:
    monkeypatch.setenv("OTHERS", "of the process that imported")
    program, process = start_preloading(tmp_path_factory.mktemp("run"), ["wave"], ["sched"])
    monkeypatch.delenv("OTHERS")
    with process:
        yield program, process.pid
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE) == 0


def test_a_fork_has_arguments_folder_variables_and_output(preloaded: tuple[Path, int], tmp_path: Path) -> None:
    program, pid = preloaded
    script = tmp_path / "script.py"
    script.write_text(TOLD)
    done = subprocess.run(
        [program, "-u", script, "--one", "two words"],
        cwd=tmp_path,
        env={"TOLD": "yes"},
        stdout=subprocess.PIPE,
        timeout=PATIENCE,
        check=True,
    )
    told = {"argv": ["--one", "two words"], "name": "__main__", "folder": str(tmp_path), "variable": "yes"}
    assert json.loads(done.stdout) == told | {"others": None, "preloaded": True, "parent": pid}


def test_spawned_processes_are_forked_and_files_are_passed(preloaded: tuple[Path, int], tmp_path: Path) -> None:
    program, pid = preloaded
    spawn = multiprocessing.get_context("spawn")
    spawn.set_executable(str(program))
    try:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_tell, args=(theirs,))
        process.start()
        theirs.close()
        assert ours.poll(PATIENCE)
        assert ours.recv() == (pid, True)
        ours.send("done")
        process.join(PATIENCE)
        assert not process.is_alive()
    finally:
        spawn.set_executable(sys.executable)


def _tell(pipe: Connection) -> None:
    pipe.send((os.getppid(), "wave" in sys.modules))
    pipe.recv()


@pytest.mark.parametrize("first", ["fork", "asker"])
def test_neither_outlives_the_other(preloaded: tuple[Path, int], first: str) -> None:
    program, pid = preloaded
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([program, "-c", code], stdout=subprocess.PIPE) as asker:
        assert asker.stdout is not None
        fork = psutil.Process(int(asker.stdout.readline()))
        assert fork.ppid() == pid
        (fork if first == "fork" else asker).kill()
        asker.wait(PATIENCE)
        # the pipe ends with the last process that could write to it
        assert asker.stdout.read() == b""


def test_without_a_fork_python_itself_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    program, process = start_preloading(tmp_path_factory.mktemp("run"), ["no_such_module"])
    with process:
        done = subprocess.run([program, "-c", TOLD, "x"], stdout=subprocess.PIPE, timeout=PATIENCE, check=True)
        told = json.loads(done.stdout)
        assert told["argv"] == ["x"] and not told["preloaded"] and told["parent"] == os.getpid()
        assert process.wait(PATIENCE) == 1
