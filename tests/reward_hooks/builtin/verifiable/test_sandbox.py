"""The sandbox: each limit, no network, nothing left behind."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from reward_hooks.builtin.verifiable.sandbox import Limits, Sandbox
from swarm.errors import ConfigError
from tests.reward_hooks.builtin.verifiable.having import needs_sandbox

pytestmark = needs_sandbox


@pytest.fixture(scope="module")
def box() -> Sandbox:
    return Sandbox()


def test_a_program_reads_its_input_and_prints(box: Sandbox) -> None:
    run = box.run("print(input() + '!')", "héllo")
    assert (run.status, run.output, run.errors) == (0, "héllo!\n", "")


def test_the_environment_is_empty_and_the_folder_fresh(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    for _ in range(2):
        run = box.run("import os; print('A_SECRET' in os.environ, os.listdir('.')); open('f', 'w').write('x')")
        assert (run.status, run.output) == (0, "False []\n")


@pytest.mark.parametrize("processes", [1, 3])
def test_numeric_libraries_are_told_how_many_threads_they_may_start(processes: int) -> None:
    """Else numpy's starts one per processor, and its import fails."""
    run = Sandbox(Limits(processes=processes)).run("import os; print(os.environ['OMP_NUM_THREADS'])")
    assert (run.status, run.output) == (0, f"{processes}\n")


def test_an_epilogue_runs_after_the_program_and_has_a_file_of_its_own(box: Sandbox) -> None:
    program = "import sys\nprint(sys.argv, __name__, __file__)\ndef open(x): return x * 2\n"
    run = box.run(program, epilogue="__import__('os').write(__result__, str(open(4)).encode())")
    assert (run.status, run.output, run.result) == (0, "['/answer.py'] __main__ /answer.py\n", "8")


def test_there_is_no_network_not_even_this_machine(box: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = box.run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
    assert run.status == 1
    assert "Connection refused" in run.errors


def test_a_program_sees_the_system_and_its_own_processes_alone(box: Sandbox) -> None:
    run = box.run("import os; print(sorted(os.listdir('/')), [n for n in os.listdir('/proc') if n.isdigit()])")
    folders, processes = run.output.split("] [")
    assert not {"home", "root", "var", "run", "etc/passwd"} & set(folders.strip("[").replace("'", "").split(", "))
    assert processes.strip("]\n") == "'1', '2'"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("x = 'a' * (2 << 30)", "MemoryError"),
        ("open('big', 'wb').write(b'x' * (2 << 20))", "File too large"),
        ("print('x' * (2 << 20))", "File too large"),
        ("import os; os.fork()", "BlockingIOError"),
        ("import threading; threading.Thread(target=print).start()", "can't start new thread"),
        ("files = [open('/dev/null') for _ in range(100)]", "Too many open files"),
        ("open('/etc/written-by-a-sandbox', 'w')", "Read-only file system"),
        ("open('/dev/written-by-a-sandbox', 'w')", "Read-only file system"),
        ("open('/usr/written-by-a-sandbox', 'w')", "Read-only file system"),
        ("for n in range(99): open(str(n), 'wb').write(b'x' * (1 << 20))", "No space left"),
        ("for n in range(99): open(f'/dev/shm/{n}', 'wb').write(b'x' * (1 << 20))", "No space left"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))", "not allowed to raise maximum limit"),
        ("import sys; sys.stdin.close(); raise SystemExit('bye')", "bye"),
    ],
)
def test_limits(box: Sandbox, program: str, said: str) -> None:
    run = box.run(program)
    assert run.status == 1
    assert said in run.errors
    assert len(run.output) <= 1 << 20


@pytest.mark.slow
def test_processor_time_is_limited() -> None:
    began = time.monotonic()
    assert Sandbox(Limits(seconds=60.0, cpu_seconds=1)).run("while True: pass").status == 137
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_late_program_is_killed_with_all_its_processes() -> None:
    name = "sandboxed-daemon-of-the-test"
    program = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    for _ in range(8):
        if os.fork() == 0:
            open("/proc/self/comm", "w").write("{name[:15]}")
            memory = bytearray(50 << 20)  # takes the kernel time to free
            time.sleep(300)
    print("up", flush=True)
time.sleep(300)
"""
    box, began = Sandbox(Limits(seconds=3.0, processes=12)), time.monotonic()
    run = box.run(program)
    assert run.status is None
    assert run.output == "up\n"
    assert 3.0 <= time.monotonic() - began < 60
    assert name[:15] not in {process.info["name"] for process in psutil.process_iter(["name"])}


def test_daemons_end_when_the_program_does() -> None:
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    open("/proc/self/comm", "w").write("left-by-the-test")
    time.sleep(300)
time.sleep(0.1)
"""
    run = Sandbox(Limits(processes=3)).run(program)
    assert run.status == 0
    assert "left-by-the-tes" not in {process.info["name"] for process in psutil.process_iter(["name"])}


@pytest.mark.slow
def test_a_fork_bomb_stays_inside() -> None:
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    assert Sandbox(Limits(seconds=1.5, processes=8)).run(bomb).status in (None, 137)


def test_a_limit_too_short_for_any_run_is_no_lack_of_a_sandbox() -> None:
    assert Sandbox(Limits(seconds=0.001)).run("print(1)").status is None


def test_a_gateway_with_more_than_a_thousand_connections_runs_programs(box: Sandbox) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        assert box.run("print('ran')").output == "ran\n"


def test_signals_and_deadlines(box: Sandbox) -> None:
    assert "ProcessLookupError" in box.run(f"import os; os.kill({os.getpid()}, 9)").errors
    assert box.run("import os; os.kill(os.getpid(), 11)").status == 139
    assert box.run("while True: pass", seconds=0.3).status is None


def test_runs_do_not_disturb_each_other(box: Sandbox) -> None:
    outputs: dict[int, str] = {}

    def work(number: int) -> None:
        outputs[number] = box.run(f"open('f', 'x').write('{number}'); print(open('f').read())").output

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {number: f"{number}\n" for number in range(6)}


def test_a_refused_system_call_says_so(box: Sandbox) -> None:
    assert (
        box.run("import socket; socket.socket(socket.AF_NETLINK)").errors.strip().endswith("not supported by protocol")
    )
    unshared = (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); libc.unshare(1 << 28); print(ctypes.get_errno())"
    )
    assert box.run(unshared).output == "1\n"


def test_a_missing_interpreter_is_refused() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Sandbox(python="/no/such/python")


def test_an_interpreter_elsewhere_brings_its_folder() -> None:
    with tempfile.TemporaryDirectory(prefix="elsewhere-") as folder:
        Path(folder).chmod(0o755)
        subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", f"{folder}/venv"], check=True)
        Path(folder, "secret").write_text("x")
        box = Sandbox(python=f"{folder}/venv/bin/python")
        run = box.run(f"import os, sys; print(sys.prefix, os.listdir({folder!r}))")
        assert run.output == f"{folder}/venv ['venv']\n"


def test_what_else_is_in_an_interpreters_folder_is_not_there() -> None:
    # `python -m venv .` in a project
    with tempfile.TemporaryDirectory(prefix="project-") as folder:
        Path(folder).chmod(0o755)
        subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", folder], check=True)
        runs = Path(folder, "runs")
        runs.mkdir()
        (runs / "journal").write_text("what users wrote")
        run = Sandbox(python=f"{folder}/bin/python").run(
            f"import json, sys; print(sys.prefix); open({str(runs / 'journal')!r})"
        )
        assert run.output == f"{folder}\n"
        assert "Error" in run.errors.splitlines()[-1]


def test_a_root_that_may_become_nobody_else_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # as in a container that drops all capabilities
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", "/")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(subprocess, "run", refused)
    for unsafe in (False, True):
        with pytest.raises(ConfigError, match="root may not become user 65534 here: run the gateway as another user"):
            Sandbox(unsafe=unsafe)


def test_a_folder_that_holds_the_users_home_is_no_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="home-") as home:
        Path(home).chmod(0o755)
        subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", home], check=True)
        monkeypatch.setenv("HOME", f"{home}/people/somebody")
        with pytest.raises(ConfigError, match="holds the user's home"):
            Sandbox(python=f"{home}/bin/python")
