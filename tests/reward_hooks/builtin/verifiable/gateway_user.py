"""A gateway's user with secrets: its files, its hook folder, its processes and sockets, and a ``code`` reward.

Runs as ``python -m tests.reward_hooks.builtin.verifiable.gateway_user UID FOLDER PYTHON``: becomes UID (0: stays what
it is), makes what a user has in FOLDER, prints where all of it is, and then answers one JSON line with another:

* ``{"answers": [...], "tests": [...], "options": {...}, "seconds": n}`` with ``{"rewards": [...], "reasons": [...]}``
  or ``{"error": code, "message": ...}``;
* ``{"plain": source}`` with ``{"output": ...}`` of the source, run by this user without any sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from reward_hooks import Candidate, HookContext, Task
from reward_hooks.builtin.verifiable.code import Code
from swarm.errors import SwarmGatewayError

#: In no answer's text: what an attack prints comes from the place that it was to be kept from.
SECRET = "s3cret-of-the-gateway"


def main() -> None:
    user, folder, python = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    os.environ["SECRET"] = SECRET
    os.umask(0o077)
    with contextlib.ExitStack() as stack:
        reply(furnished(folder, python, stack))
        for line in sys.stdin:
            request = json.loads(line)
            reply(plain(python, request["plain"]) if "plain" in request else judged(python, request))


def furnished(folder: Path, python: str, stack: contextlib.ExitStack) -> dict[str, Any]:
    """What a user has, and where."""
    (folder / "expected.json").write_text(json.dumps(SECRET))
    (folder / "hooks").mkdir()
    (folder / "hooks/on_compute_relative_reward.py").write_text("# of the gateway's user\n")
    listen(stack, socket.AF_UNIX, str(folder / "socket"))
    listen(stack, socket.AF_UNIX, f"\0{folder}")
    ports = [listen(stack, socket.AF_INET, ("127.0.0.1", 0)), listen(stack, socket.AF_INET6, ("::1", 0))]
    # a neighbour whose command line and environment are nobody's business
    neighbour = subprocess.Popen([python, "-I", "-S", "-c", "import time; time.sleep(3600)", SECRET])
    stack.callback(neighbour.kill)
    remember()
    return {
        "folder": str(folder),
        "shared": shared(stack),
        "ipv4": ports[0].getsockname()[1],
        "ipv6": ports[1].getsockname()[1],
        "gateway": os.getpid(),
        "neighbour": neighbour.pid,
    }


def listen(stack: contextlib.ExitStack, family: socket.AddressFamily, address: Any) -> socket.socket:
    listener = stack.enter_context(socket.socket(family))
    listener.bind(address)
    listener.listen(64)
    return listener


def shared(stack: contextlib.ExitStack) -> int:
    """Memory and a queue of the user; the id of the memory."""
    libc, realtime, queue = ctypes.CDLL(None), ctypes.CDLL("librt.so.1"), f"/gateway-{os.getpid()}".encode()
    memory = libc.shmget(0, 1 << 12, 0o1600)
    stack.callback(libc.shmctl, memory, 0, None)
    realtime.mq_open(queue, os.O_RDWR | os.O_CREAT, 0o600, None)
    stack.callback(realtime.mq_unlink, queue)
    return memory


def remember() -> None:
    """Put the secret into the session's keyring, which children inherit."""
    number = {"x86_64": 248, "aarch64": 217}.get(platform.machine())
    if number is not None:
        libc = ctypes.CDLL(None)
        libc.syscall(number, b"user", b"gateway", SECRET.encode(), len(SECRET), -3)


def judged(python: str, request: dict[str, Any]) -> dict[str, Any]:
    answers = [
        Candidate(index=index, message={"role": "assistant", "content": text}, text=text)
        for index, text in enumerate(request["answers"])
    ]
    context = HookContext(num_repeat=len(answers), deadline_seconds=request["seconds"])
    task = Task(task_id="t", metadata={"tests": request["tests"]})
    started = time.monotonic()
    try:
        rewards = hook(python, json.dumps(request["options"])).on_compute_relative_reward(task, answers, context)
    except SwarmGatewayError as exc:
        return {"error": exc.code, "message": exc.message}
    except BaseException as exc:  # what must not happen, and happened
        return {"error": type(exc).__name__, "message": str(exc)[:300]}
    return {
        "rewards": [reward.value for reward in rewards],
        "reasons": [reward.reason for reward in rewards],
        "took": time.monotonic() - started,
    }


@functools.cache
def hook(python: str, options: str) -> Code:
    """The hook with these options, as a gateway has it: made once, since that runs a program in the sandbox."""
    return Code(python=python, **json.loads(options))


def plain(python: str, source: str) -> dict[str, Any]:
    done = subprocess.run([python, "-I", "-c", source], capture_output=True, text=True, cwd="/", timeout=60)
    return {"output": done.stdout, "errors": done.stderr}


def reply(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
