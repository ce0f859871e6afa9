"""Deadlines that end the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adapters.verl.deadline import deadline, forget_deadline, passed_deadline
from adapters.verl.meeting import RANKS_FOLDER, RUN_VARIABLE, private_handle

HANG = """
import threading, sys
from pathlib import Path
from adapters.verl.deadline import deadline
with deadline(0.1, "the weight sync", Path(sys.argv[1])):
    threading.Event().wait()
"""


def test_a_call_that_hangs_ends_the_process_and_says_why(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HANG, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert passed_deadline(tmp_path) == "the weight sync did not finish within 0 s"
    assert "threading.py" in done.stderr, "where it hung is in the log"
    forget_deadline(tmp_path)
    forget_deadline(tmp_path)
    assert passed_deadline(tmp_path) == ""


def test_a_full_disk_keeps_no_process_that_hangs(tmp_path: Path) -> None:
    # where no file can be made either
    gone = tmp_path / "gone"
    done = subprocess.run([sys.executable, "-c", HANG, str(gone)], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert "the weight sync did not finish within 0 s" in done.stderr and "threading.py" in done.stderr


def test_a_call_in_time_leaves_nothing(tmp_path: Path) -> None:
    with deadline(60.0, "this", tmp_path):
        pass
    assert passed_deadline(tmp_path) == ""


def test_weights_travel_on_a_socket_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_VARIABLE, "1234abcd")
    monkeypatch.delenv(RANKS_FOLDER, raising=False)
    assert private_handle("ipc:///tmp/rl-colocate-0.sock") == "ipc:///tmp/swarm-1234abcd-rl-colocate-0.sock"
    # on one machine it goes with the folder of the run
    monkeypatch.setenv(RANKS_FOLDER, "/tmp/swarm-ray-12345678")
    assert private_handle("ipc:///tmp/rl-colocate-0.sock") == "ipc:///tmp/swarm-ray-12345678/rl-colocate-0.sock"
