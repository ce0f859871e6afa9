"""The sandbox: each limit, no network, nothing left behind."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import psutil
import pytest

from reward_hooks.verifiable.sandbox import Limits, Sandbox
from swarm.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def box() -> Sandbox:
    try:
        return Sandbox()
    except ConfigError as exc:
        pytest.skip(f"this system grants no sandbox: {exc.message}")


def test_a_program_reads_its_input_and_prints(box: Sandbox) -> None:
    run = box.run("print(input() + '!')", "héllo")
    assert (run.status, run.output, run.errors) == (0, "héllo!\n", "")


def test_the_environment_is_empty_and_the_folder_fresh(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    run = box.run("import os; print('A_SECRET' in os.environ, os.listdir('.')); open('f', 'w').write('x')")
    assert (run.status, run.output) == (0, "False []\n")
    where = box.run("import os; print(os.getcwd())").output.strip()
    assert not Path(where).exists()


def test_there_is_no_network_not_even_this_machine(box: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = box.run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
    assert run.status == 1
    assert "Network is unreachable" in run.errors


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("x = 'a' * (2 << 30)", "MemoryError"),
        ("open('big', 'wb').write(b'x' * (2 << 20))", "File too large"),
        ("print('x' * (2 << 20))", "File too large"),
        ("import os; os.fork()", "BlockingIOError"),
        ("import threading; threading.Thread(target=print).start()", "can't start new thread"),
        ("files = [open('/dev/null') for _ in range(100)]", "Too many open files"),
        ("open('/etc/written-by-a-sandbox', 'w')", "Permission denied"),
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
    run = Sandbox(Limits(cpu_seconds=1)).run("while True: pass")
    assert run.status == 137
    assert run.seconds < 60


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
    run = Sandbox(Limits(seconds=3.0, processes=12)).run(program)
    assert run.status is None
    assert run.output == "up\n"
    assert 3.0 <= run.seconds < 60
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


def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the launcher's unshare fail as on a system that forbids it."""
    from reward_hooks.verifiable import launcher

    text = Path(launcher.__file__).read_text()
    broken = tmp_path / "launcher.py"
    changed = text.replace("_checked(libc.unshare(namespaces)", "_checked(libc.unshare(-1)")
    assert changed != text
    broken.write_text(changed)
    monkeypatch.setattr("reward_hooks.verifiable.sandbox._LAUNCHER", str(broken))


def test_without_isolation_nothing_runs_unless_it_is_waived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"unshare.*allow_network") as caught:
        Sandbox()
    assert caught.value.code == "no_sandbox"
    open_box = Sandbox(allow_network=True)
    assert open_box.run("print(1)").output == "1\n"
    assert "MemoryError" in open_box.run("x = 'a' * (2 << 30)").errors
    # a late program is not asked to end
    stubborn = "import signal, time\nsignal.signal(15, lambda *_: print('late'))\ntime.sleep(300)"
    late = open_box.run(stubborn, seconds=1.0)
    assert (late.status, late.output) == (None, "") and late.seconds < 5


def test_a_missing_interpreter_is_refused() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Sandbox(python="/no/such/python")
