"""What vLLM's core died of, in the lines of vLLM 0.28 as Ray prints them; and deadlines that end the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from adapters.verl.causes import core_exception, deadline, forget_deadline, passed_deadline

RAY = "\x1b[36m(vLLMHttpServer pid=68)\x1b[0m "
CORE = RAY + "(EngineCore pid=90) ERROR 11-24 03:21:50 [core.py:1348] "
SERVER = RAY + "ERROR 11-24 03:21:50 [async_llm.py:744] "
#: the server is told later than it fails, and Ray brings both in any order
BEFORE = f"""\
{RAY}AttributeError: 'State' object has no attribute 'server'
{RAY}(EngineCore pid=90) ERROR 11-24 03:20:00 [core.py:1581] Invocation of reset method failed
{RAY}(EngineCore pid=90) ERROR 11-24 03:20:00 [core.py:1581] Traceback (most recent call last):
{RAY}(EngineCore pid=90) ERROR 11-24 03:20:00 [core.py:1581] ValueError: it lives on
"""
DEATH = f"""\
{CORE}EngineCore encountered a fatal error.
{CORE}Traceback (most recent call last):
{CORE}  File "vllm/v1/engine/core.py", line 1339, in run_engine_core
{CORE}    engine_core.run_busy_loop()
{RAY}a line of somebody else
{CORE}RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0
{CORE}
{CORE}During handling of the above exception, another exception occurred:
{CORE}Traceback (most recent call last):
{CORE}KeyError: 'later'
{SERVER}Traceback (most recent call last):
{SERVER}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""


def test_the_first_exception_of_the_core_is_found(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert core_exception(log) == ""
    log.write_text(BEFORE)
    assert core_exception(log) == "", "the core lives"
    log.write_text(BEFORE + DEATH)
    cause = "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0"
    assert core_exception(log) == cause
    assert core_exception(log, start=log.stat().st_size) == "", "of an earlier run"
    assert core_exception(log, start=log.stat().st_size + 1) == cause, "the log was cut, as logrotate does"


def test_a_core_that_does_not_start_has_its_exception(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(DEATH.replace("EngineCore encountered a fatal error.", "EngineCore failed to start."))
    assert core_exception(log, within=1.0).startswith("RuntimeError: Unsupported")


def test_a_core_whose_workers_do_not_start_has_their_exception(tmp_path: Path) -> None:
    # on GPUs the model lies in processes of their own, whose lines come in any order
    first, second = (
        f"{RAY}(Worker_TP{rank} pid=9{rank}) ERROR 11-29 10:03:43 [multiproc_executor.py:941]" for rank in "01"
    )
    full = "ValueError: Free memory on device cuda:0 (10.2/79.1 GiB) on startup is less than desired"
    log = tmp_path / "engine.log"
    log.write_text(f"""\
{first} WorkerProc failed to start.
{first} Traceback (most recent call last):
{second} WorkerProc failed to start.
{second} Traceback (most recent call last):
{first}   File "vllm/v1/worker/gpu_worker.py", line 1, in init_device
{first} {full}
{second} RuntimeError: the other one is gone
{CORE}EngineCore failed to start.
{CORE}Traceback (most recent call last):
{CORE}Exception: WorkerProc initialization failed due to an exception in a background process.
""")
    assert core_exception(log) == full


HANG = """
import threading, sys
from pathlib import Path
from adapters.verl.causes import deadline
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
