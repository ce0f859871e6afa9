"""Real child processes, each a line of Python."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gateway.launch.children import FOLDER_VARIABLE, Child, end_left_behind, left_behind
from gateway.launch.servers import ended
from tests.processes import alive

pytestmark = pytest.mark.slow

# says when its handlers are in place
READY = "print('ready', flush=True); time.sleep(60)"


def child(tmp_path: Path, code: str) -> Child:
    return Child("child", [sys.executable, "-c", f"import os, signal, subprocess, sys, time\n{code}"], tmp_path / "log")


def wait_for(one: Child, pattern: str) -> str:
    poll = threading.Event()
    for _ in range(600):
        if match := one.find(pattern):
            return match[0]
        assert one.exit_code is None, one.last_lines()
        poll.wait(0.05)
    pytest.fail(f"no {pattern!r} in {one.last_lines()}")


def test_a_polite_child_ends_by_itself(tmp_path: Path) -> None:
    one = child(tmp_path, f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); {READY}")
    wait_for(one, "ready")
    assert one.stop(grace=30)
    assert one.exit_code == 0


def test_how_a_child_ended_is_told_without_its_log(tmp_path: Path) -> None:
    one = child(tmp_path, READY)
    wait_for(one, "ready")
    one.log.unlink()
    one.stop(grace=30)
    assert str(ended(one)) == "the child was killed by SIGTERM" and not ended(one).last_lines


@pytest.mark.parametrize(("grace", "hurried"), [(0.2, False), (3600.0, True)])
def test_a_deaf_child_is_killed_after_the_grace_or_at_once(tmp_path: Path, grace: float, hurried: bool) -> None:
    one = child(tmp_path, f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}")
    wait_for(one, "ready")
    hurry = threading.Event()
    if hurried:
        hurry.set()
    assert not one.stop(grace, hurry)
    assert one.exit_code == -9


def test_a_grandchild_in_a_session_of_its_own_goes_too(tmp_path: Path) -> None:
    one = child(
        tmp_path,
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"print('pid', p.pid, flush=True); {READY}",
    )
    grandchild = int(wait_for(one, r"pid \d+\n").split()[1])
    assert alive(grandchild)
    one.stop(grace=10)
    assert not alive(grandchild)


def test_stdin_closes_when_the_child_is_stopped(tmp_path: Path) -> None:
    one = child(
        tmp_path,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)\nsys.stdin.read(); print('alone')",
    )
    wait_for(one, "ready")
    assert one.stop(grace=30)
    assert one.last_lines() == ["ready", "alone"]


def test_the_last_lines_of_one_that_died(tmp_path: Path) -> None:
    one = child(tmp_path, "print('a\\n\\nb'); sys.exit('the reason')")
    poll = threading.Event()
    while one.exit_code is None:
        poll.wait(0.05)
    one.stop(grace=30)
    assert one.last_lines(2) == ["b", "the reason"]
    assert one.exit_code == 1


def test_new_lines_are_whole_and_come_once(tmp_path: Path) -> None:
    one = child(tmp_path, f"print('one'); print('two', end='', flush=True); {READY.replace('ready', ' more')}")
    wait_for(one, "more")
    assert one.new_lines() == ["one", "two more"]
    with one.log.open("a") as log:
        log.write("half")
    assert one.new_lines() == []
    with one.log.open("a") as log:
        log.write(" a line\nthree\n")
    assert one.new_lines() == ["half a line", "three"]
    one.log.unlink()
    assert one.new_lines() == []
    one.stop(grace=0)


def test_a_log_that_is_cut_while_it_is_written_goes_on_from_its_beginning(tmp_path: Path) -> None:
    """As `logrotate` does with `copytruncate`."""
    go_on = tmp_path / "go_on"
    waiting = f"while not os.path.exists({str(go_on)!r}): time.sleep(0.01)"
    one = child(tmp_path, f"print('first', flush=True)\n{waiting}\nprint('second', flush=True); {READY}")
    wait_for(one, "first")
    assert one.new_lines() == ["first"]
    os.truncate(one.log, 0)
    assert one.new_lines() == []
    go_on.touch()
    wait_for(one, "ready")
    assert one.new_lines() == ["second", "ready"]
    assert one.log.read_text() == "second\nready\n"
    one.stop(grace=0)


def test_what_an_earlier_start_left_is_waited_for_and_then_killed(tmp_path: Path) -> None:
    script = "import time; print('up', flush=True); time.sleep(60)"
    env = {**os.environ, FOLDER_VARIABLE: str(tmp_path)}
    # in a session of its own, as what Ray starts
    with subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [one.pid for one in left_behind(tmp_path)] == [process.pid]
        assert left_behind(tmp_path / "other") == []
        end_left_behind(tmp_path, 0.1, threading.Event())
        process.wait(10)
    assert left_behind(tmp_path) == []
