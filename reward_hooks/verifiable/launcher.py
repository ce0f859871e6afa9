"""The start of a sandboxed program: set the limits, leave the network, and exec the program.

Runs as ``python -I -S launcher.py JSON``, with the standard library only: a process with threads can do nothing safely
between fork and exec, so this single-threaded one sets the limits.

JSON: ``{"argv": [...], "isolate": bool, "user": uid or null, "limits": {"CPU": n, ...}}``. Exits with the program's
status, 128 + the signal that ended it, or 125 when the sandbox cannot be set up (the reason is on standard error).
On SIGTERM it kills the program, and exits when all its processes have ended.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

#: Exit status if the sandbox could not be set up; the program did not run.
NO_SANDBOX = 125

_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def main() -> None:
    spec = json.loads(sys.argv[1])
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        if spec["user"] is not None:
            os.setgroups([])
            os.setgid(spec["user"])
            os.setuid(spec["user"])
        if not spec["isolate"]:
            _become(spec)
        # in one call: the user namespace allows the others without privilege
        namespaces = _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWIPC
        _checked(libc.unshare(namespaces), "unshare of the user, network, process and IPC namespaces")
    except OSError as exc:
        print(f"no sandbox: {exc}", file=sys.stderr)
        os._exit(NO_SANDBOX)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # when the first process of a process namespace ends, all others end before it can be waited for, daemons included
    first = os.fork()
    if first:
        signal.signal(signal.SIGTERM, lambda number, frame: _kill(first))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _end_like(first)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # a program that signals its own group does not reach the launcher
    os.setsid()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # the first process ignores most signals, so the program is its child
    program = os.fork()
    if program:
        _end_like(program)
    _become(spec)


def _become(spec: dict[str, Any]) -> None:
    try:
        for name, value in spec["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        os.execv(spec["argv"][0], spec["argv"])
    except (OSError, ValueError) as exc:
        print(f"no sandbox: {exc}", file=sys.stderr)
        os._exit(NO_SANDBOX)


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(child, signal.SIGKILL)


def _end_like(child: int) -> None:
    status = os.waitpid(child, 0)[1]
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
