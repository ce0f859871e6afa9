"""Processes that are forked from one that has imported torch, verl and vLLM, in the place of new Python processes.

Trainer, worker, queue, vLLM's server and its core would each import much the same for ten seconds; here one process
does, while Ray starts. Only for a run on a CPU: what a process knows of GPUs when it has imported is not a fork's.

Invariant: a fork has the arguments, variables, folder, files, limit of files, priority and process group of the
process that it stands for. It ends with that one, which passes SIGTERM and SIGINT on and has the fork's exit code, or 1
where that was killed or took no time to tell (``os._exit``). Where nothing can be forked, that process itself runs.

A fork is a child of the process that forks, and may not outlive it: verl's ``set_death_signal`` binds vLLM's core to
it. Of that process it also has ``sys.path``, umask, CPUs, other limits, session and what was loaded: ``LD_PRELOAD``
loads nothing, and variables that a library sets when it is imported are not set.

This file is also the program that stands there: it must import nothing heavy.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import resource
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: what the processes of a run import
MODULES = ("setproctitle", "torch", "transformers", "tensordict", "vllm")
#: the same, of what imports Ray, which takes its settings from the variables at that time: those of its first worker
RAY_MODULES = ("adapters.verl.trainer", "adapters.verl.worker", "adapters.verl.lasting", "vllm.v1.engine.core")
#: files of one request; Linux takes 253
MOST_FILES = 64
#: seconds for a request that has begun; meanwhile no other process is forked
PATIENCE = 10.0


def start_preloading(
    folder: Path, modules: Sequence[str] = MODULES, ray_modules: Sequence[str] = RAY_MODULES
) -> tuple[list[str], subprocess.Popen[bytes]]:
    """Start the process that imports and then forks, with this one's variables; it ends when its stdin does.

    Args:
        folder: for its socket; must be short.
        modules: to import at once.
        ray_modules: to import with the variables of the first process that is forked for.

    Returns:
        The command to run in the place of Python; and the process.
    """
    program, address = folder / "python", folder / "preloaded"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        descriptor = listener.fileno()
        settings = (descriptor, str(program), [*modules], [*ray_modules])
        code = f"from adapters.verl.preloaded import serve; serve(*{settings!r})"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            pass_fds=[descriptor],
            # setproctitle finds by the first variable where a title goes: no process that is forked for may have it
            env={"SWARM_FIRST_VARIABLE": "", **os.environ},
        )
    command = [sys.executable, "-I", "-S", __file__, str(address)]
    # multiprocessing takes no command
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o700)
    return command, process


def serve(descriptor: int, program: str, modules: list[str], ray_modules: list[str]) -> None:
    """Import, then fork for each process that connects to the socket; a fork returns when it has done its work."""
    import gc
    import importlib

    listener = socket.socket(fileno=descriptor)
    for name in modules:
        importlib.import_module(name)
    while 0 not in select.select([0, listener], [], [])[0]:
        connection, _ = listener.accept()
        connection.settimeout(PATIENCE)
        request: dict[str, Any] = {}
        files: list[int] = []
        # who asks may have died
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            _, files, _, _ = socket.recv_fds(connection, 1, MOST_FILES)
            request = json.loads(lines.readline())
        if request and ray_modules:
            os.environ.update(request["environment"])
            for name in ray_modules:
                importlib.import_module(name)
            ray_modules = []
            # a collection in a fork would copy every page
            gc.collect()
            gc.freeze()
        # forks that end are reaped by the kernel
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        forked = -1
        # where a system has no room for another process, nothing is forked
        with contextlib.suppress(OSError):
            forked = os.fork() if request else -1
        if forked == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            held = _stand_in(request, files, connection)
            code = 1
            try:
                _run(request["arguments"], program)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
                raise
            finally:
                os.write(held, bytes([code & 255]))
            return
        for file in files:
            os.close(file)
        connection.close()


def _stand_in(request: dict[str, Any], files: list[int], connection: socket.socket) -> int:
    """Take the place of the process that is connected; returns the connection, which stays open to the end."""
    asker = request["pid"]
    # Ray raises the limit of its workers, and kills what a worker's group has left
    resource.setrlimit(resource.RLIMIT_NOFILE, resource.prlimit(asker, resource.RLIMIT_NOFILE))
    with contextlib.suppress(OSError):
        os.setpgid(0, os.getpgid(asker))
    aside = max(request["files"], default=2) + 1
    held = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, aside)
    connection.close()
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, aside) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    if "-c" in request["arguments"] and "setproctitle" in sys.modules:
        # vLLM's core: where its title goes is found by the variables as they were. Ray sets titles without, and keeps
        # the variables, by which processes of a run are found, where others read them.
        sys.modules["setproctitle"].getproctitle()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    # what may be lowered by root alone
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, asker))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(Path(f"/proc/{asker}/oom_score_adj").read_text())
    # the kernel kills when the other end is closed, and when it sends anything
    fcntl.fcntl(held, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(held, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(held, fcntl.F_SETFL, fcntl.fcntl(held, fcntl.F_GETFL) | os.O_ASYNC)
    os.write(held, os.getpid().to_bytes(4))
    return held


def _run(arguments: list[str], program: str) -> None:
    """What Python does with these arguments."""
    import multiprocessing
    import runpy

    # what a library has chosen when it was imported
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
        sys.modules["numpy"].random.seed()
        # it may be a list, of each level of nested regions, or nonsense
        with contextlib.suppress(ValueError, RuntimeError):
            sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]))
    # what is spawned is forked, too, unless the folder is mounted noexec
    if os.access(program, os.X_OK):
        multiprocessing.set_executable(program)
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], sys.modules["__main__"].__dict__)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _ask(address: str, arguments: list[str]) -> None:
    """Have a fork stand in for this process, and end as it does; without one, become Python."""
    # the listing's own is closed by now
    files = [file for file in map(int, os.listdir("/proc/self/fd")) if os.path.lexists(f"/proc/self/fd/{file}")]
    # what the forking process has by its variables; with any other option Python itself runs
    asked = list(itertools.dropwhile(("-u", "-B", "-P").__contains__, arguments))
    request = {"arguments": asked, "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
    pid, code = b"", b"\1"
    # some builds of Python have no pidfd_open
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError, AttributeError):
        waited: list[Any] = [connection]
        if "--multiprocessing-fork" in asked:
            # dies with its parent: of the two, only this process is its child
            waited.append(os.pidfd_open(os.getppid()))
        if asked and (asked[0] == "-c" or not asked[0].startswith("-")) and len(files) <= MOST_FILES:
            connection.connect(address)
            socket.send_fds(connection, [b"+"], files)
            connection.sendall(json.dumps(request | {"pid": os.getpid()}).encode() + b"\n")
            pid = connection.recv(4)
            for number in (signal.SIGTERM, signal.SIGINT) if pid else ():
                signal.signal(number, lambda number, _: os.kill(int.from_bytes(pid), number))
            while connection in select.select(waited, [], [])[0] and (received := connection.recv(1)):
                code = received
    if not pid:
        os.execv(sys.executable, [sys.executable, *arguments])
    sys.exit(code[0])


if __name__ == "__main__":
    _ask(sys.argv[1], sys.argv[2:])
