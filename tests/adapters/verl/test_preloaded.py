"""A fork behaves as the Python process that it stands for."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
def preloaded(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[str], int]]:
    monkeypatch.setenv("OTHERS", "of the process that imported")
    command, process = start_preloading(tmp_path_factory.mktemp("run"), ["wave"], ["sched"])
    monkeypatch.delenv("OTHERS")
    with process:
        yield command, process.pid
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE) == 0


def test_a_fork_has_arguments_folder_variables_and_output(preloaded: tuple[list[str], int], tmp_path: Path) -> None:
    command, pid = preloaded
    script = tmp_path / "script.py"
    script.write_text(TOLD)
    done = subprocess.run(
        [*command, "-u", script, "--one", "two words"],
        cwd=tmp_path,
        env={"TOLD": "yes"},
        stdout=subprocess.PIPE,
        timeout=PATIENCE,
        check=True,
    )
    told = {"argv": ["--one", "two words"], "name": "__main__", "folder": str(tmp_path), "variable": "yes"}
    assert json.loads(done.stdout) == told | {"others": None, "preloaded": True, "parent": pid}


def test_spawned_processes_are_forked_and_files_are_passed(preloaded: tuple[list[str], int], tmp_path: Path) -> None:
    command, pid = preloaded
    spawn = multiprocessing.get_context("spawn")
    spawn.set_executable(str(Path(command[-1]).with_name("python")))
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
def test_neither_outlives_the_other(preloaded: tuple[list[str], int], first: str) -> None:
    command, pid = preloaded
    # a call of C that lets no other thread run
    code = "import ctypes, os; print(os.getpid(), flush=True); ctypes.PyDLL(None).sleep(600)"
    with subprocess.Popen([*command, "-c", code], stdout=subprocess.PIPE) as asker:
        assert asker.stdout is not None
        fork = psutil.Process(int(asker.stdout.readline()))
        assert fork.ppid() == pid
        (fork if first == "fork" else asker).kill()
        asker.wait(PATIENCE)
        # the pipe ends with the last process that could write to it
        assert asker.stdout.read() == b""


def test_what_was_spawned_ends_with_its_parent(preloaded: tuple[list[str], int], tmp_path: Path) -> None:
    command, pid = preloaded
    script = tmp_path / "script.py"
    script.write_text("""
import multiprocessing, os, time
def child():
    print(os.getppid(), flush=True)
    time.sleep(600)
if __name__ == "__main__":
    print(os.getpid(), flush=True)
    multiprocessing.get_context("spawn").Process(target=child).start()
    time.sleep(600)
""")
    with subprocess.Popen([*command, script], stdout=subprocess.PIPE) as asker:
        assert asker.stdout is not None
        parent = int(asker.stdout.readline())
        assert int(asker.stdout.readline()) == pid
        os.kill(parent, signal.SIGKILL)
        assert asker.stdout.read() == b""


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", 1)],
)
def test_the_exit_code_is_the_forks(preloaded: tuple[list[str], int], code: str, exit_code: int) -> None:
    assert subprocess.run([*preloaded[0], "-c", code], timeout=PATIENCE).returncode == exit_code


def test_a_fork_hears_of_sigterm(preloaded: tuple[list[str], int]) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(flush=True); time.sleep(600)"
    with subprocess.Popen([*preloaded[0], "-c", code], stdout=subprocess.PIPE) as asker:
        assert asker.stdout is not None
        asker.stdout.readline()
        asker.terminate()
        assert asker.wait(PATIENCE) == 7


def test_priorities_limits_and_files_with_high_numbers_are_the_askers(preloaded: tuple[list[str], int]) -> None:
    command, _ = preloaded
    shell = 'echo 500 > /proc/$$/oom_score_adj; ulimit -Sn 300; exec nice -n 3 "$@"'
    reading, writing = os.pipe()
    high = fcntl.fcntl(writing, fcntl.F_DUPFD, 203)
    told = "{os.nice(0)} {os.getppid()} {os.getpgid(0)} {resource.getrlimit(7)[0]} "
    code = f"import os, resource; os.write({high}, f'{told}'.encode())\n"
    code += f"os.write({high}, open('/proc/self/oom_score_adj', 'rb').read())"
    with subprocess.Popen(["sh", "-c", shell, "sh", *command, "-c", code], pass_fds=[high], process_group=0) as asker:
        assert asker.wait(PATIENCE) == 0
    os.close(high)
    os.close(writing)
    with open(reading) as answer:
        expected = [os.nice(0) + 3, preloaded[1], asker.pid, 300, 500]
        assert [int(number) for number in answer.read().split()] == expected


def test_an_asker_that_dies_before_it_asks_harms_nobody(preloaded: tuple[list[str], int]) -> None:
    command, pid = preloaded
    for said in (b"", b"+", b"+{"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(command[-1])
            connection.sendall(said)
    assert _told([*command, "-c", TOLD])["parent"] == pid


@pytest.mark.parametrize(("options", "forked"), [(["-u", "-B", "-P"], True), (["-X", "dev"], False)])
def test_a_fork_knows_no_options(preloaded: tuple[list[str], int], options: list[str], forked: bool) -> None:
    command, pid = preloaded
    assert _told([*command, *options, "-c", TOLD])["parent"] == (pid if forked else os.getpid())


def test_a_folder_without_programs_leaves_multiprocessing_alone(preloaded: tuple[list[str], int]) -> None:
    command, pid = preloaded
    # as mounted noexec
    Path(command[-1]).with_name("python").chmod(0o600)
    code = "import json, os; from multiprocessing.spawn import get_executable as e; "
    told = _told([*command, "-c", code + "print(json.dumps([os.fsdecode(e()), os.getppid()]))"])
    assert told == [sys.executable, pid]


def test_forks_have_titles_whichever_variables_change(tmp_path_factory: pytest.TempPathFactory) -> None:
    command, process = start_preloading(tmp_path_factory.mktemp("run"), ["setproctitle"], ["ray"])
    told = "print(open('/proc/self/comm').read(), open('/proc/self/cmdline').read().rstrip(chr(0)), flush=True)"
    script = tmp_path_factory.mktemp("ray") / "worker.py"
    script.write_text(f"import ray; ray._raylet.setproctitle('of ray'); {told}")
    core = ["-c", f"import setproctitle as titles; titles.setproctitle('of vllm'); {told}"]
    environment = dict.fromkeys(os.environ, "changed")
    with process:
        for arguments, title in ((core, "of vllm"), ([script], "of ray")):
            run = [*command, *arguments]
            done = subprocess.run(run, env=environment, stdout=subprocess.PIPE, timeout=PATIENCE, check=True)
            assert done.stdout.split(b"\n")[:2] == [title.encode(), f" {title}".encode()]
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE) == 0


def _told(command: list[str]) -> Any:
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE, check=True).stdout)


def test_a_python_without_pidfds_runs_itself() -> None:
    asked = ["-c", "print('ran')", "--multiprocessing-fork"]
    code = (
        f"import os; os.__dict__.pop('pidfd_open', 0); from adapters.verl.preloaded import _ask; _ask('/none', {asked})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=PATIENCE).stdout == b"ran\n"


def test_without_a_fork_python_itself_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    command, process = start_preloading(tmp_path_factory.mktemp("run"), ["no_such_module"])
    with process:
        done = subprocess.run([*command, "-c", TOLD, "x"], stdout=subprocess.PIPE, timeout=PATIENCE, check=True)
        told = json.loads(done.stdout)
        assert told["argv"] == ["x"] and not told["preloaded"] and told["parent"] == os.getpid()
        assert process.wait(PATIENCE) == 1
