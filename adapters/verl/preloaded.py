"""Processes that are forked from one that has imported torch, verl and vLLM, in the place of new Python processes.

Trainer, worker, queue, vLLM's server and its core would each import much the same for ten seconds; here one process
does, while Ray starts. Only for a run on a CPU: what a process knows of GPUs when it has imported is not a fork's.

Invariant: a fork has the arguments, variables, folder and files of the process that it stands for, and ends with it, as
that one ends with the fork. Where nothing can be forked, that process itself runs.

This file is also the program that stands there: it must import nothing heavy.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
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
#: a request brings its files to descriptors from here on, where none of a new process is
ASIDE = 200
#: files of one request; Linux takes 253
MOST_FILES = 64


def start_preloading(
    folder: Path, modules: Sequence[str] = MODULES, ray_modules: Sequence[str] = RAY_MODULES
) -> tuple[Path, subprocess.Popen[bytes]]:
    """Start the process that imports and then forks, with this one's variables; it ends when its stdin does.

    Args:
        folder: for its socket; must be short.
        modules: to import at once.
        ray_modules: to import with the variables of the first process that is forked for.

    Returns:
        What to run in the place of Python, a program in ``folder``; and the process.
    """
    program, address = folder / "python", folder / "preloaded"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        descriptor = listener.fileno()
        settings = (descriptor, str(program), [*modules], [*ray_modules])
        code = f"from adapters.verl.preloaded import serve; serve(*{settings!r})"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=[descriptor])
    command = shlex.join([sys.executable, "-I", "-S", __file__, str(address)])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o700)
    return program, process


def serve(descriptor: int, program: str, modules: list[str], ray_modules: list[str]) -> None:
    """Import, then fork for each process that connects to the socket; a fork returns when it has done its work."""
    import gc
    import importlib
    import select
    import signal

    listener = socket.socket(fileno=descriptor)
    for name in modules:
        importlib.import_module(name)
    # the kernel reaps
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while 0 not in select.select([0, listener], [], [])[0]:
        connection, _ = listener.accept()
        _, received, _, _ = socket.recv_fds(connection, 1, MOST_FILES)
        files = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, ASIDE) for file in received]
        for file in received:
            os.close(file)
        with connection.makefile("rb") as lines:
            request: dict[str, Any] = json.loads(lines.readline())
        if ray_modules:
            new = request["environment"].items() - os.environ.items()
            # the others keep their place in memory, which tells where a title goes
            os.environ.update(new)
            for name in ray_modules:
                importlib.import_module(name)
            ray_modules = []
            # a collection in a fork would copy every page
            gc.collect()
            gc.freeze()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _stand_in(request, files, connection)
            _run(request["arguments"], program)
            return
        for file in files:
            os.close(file)
        connection.close()


def _stand_in(request: dict[str, Any], files: list[int], connection: socket.socket) -> None:
    """Take the place of the process that is connected."""
    import threading

    held = socket.socket(fileno=fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, ASIDE))
    connection.close()
    for file, number in zip(files, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    if "-c" in request["arguments"] and "setproctitle" in sys.modules:
        # vLLM's core: the place of its title is found by the variables as they were. Ray sets titles itself, and keeps
        # the variables, by which processes of a run are found, where others read them.
        sys.modules["setproctitle"].getproctitle()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    held.sendall(b"+")

    def end_with_it() -> None:
        held.recv(1)
        os._exit(1)

    threading.Thread(target=end_with_it, name="preloaded", daemon=True).start()


def _run(arguments: list[str], program: str) -> None:
    """What Python does with these arguments."""
    import multiprocessing
    import runpy

    # what a library has chosen when it was imported
    if (threads := os.environ.get("OMP_NUM_THREADS")) and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    # what is spawned is forked, too
    multiprocessing.set_executable(program)
    while arguments[0] != "-c" and arguments[0].startswith("-"):
        del arguments[0]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], sys.modules["__main__"].__dict__)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _ask(address: str, arguments: list[str]) -> None:
    """Have a fork stand in for this process, and wait for its end; without one, become Python."""
    # the listing's own is closed by now
    files = [file for file in map(int, os.listdir("/proc/self/fd")) if os.path.lexists(f"/proc/self/fd/{file}")]
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
    with socket.socket(socket.AF_UNIX) as connection:
        begun = b""
        with contextlib.suppress(OSError):
            connection.connect(address)
            socket.send_fds(connection, [b"+"], files)
            connection.sendall(json.dumps(request).encode() + b"\n")
            begun = connection.recv(1)
            connection.recv(1)
    if not begun:
        os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    _ask(sys.argv[1], sys.argv[2:])
