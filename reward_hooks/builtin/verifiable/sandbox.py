"""Run untrusted Python in a sandbox: namespaces made by bubblewrap, or Landlock where these are refused.

Invariant: a program runs with all of its limits and cut off from the machine, or not at all, and leaves nothing behind:
no file, no process, no IPC object. Nothing of the run is on a disk: source, input and outputs are files in memory.

* With bubblewrap (https://github.com/containers/bubblewrap), a program sees ``/usr`` and what its interpreter runs
  from, read-only; ``/tmp`` and ``/dev/shm``, empty and its own; ``/proc`` with its own processes; a network with
  nothing in it. Not limited: the kernel's memory for the names of empty files (about 1 KB each, until the run ends).
* With Landlock of Linux 6.12 (``landlock.py``), as in most containers, it can read the same
  folders, and has no file to write, no process or thread of its own, no socket and no ``/proc``. It can learn whether a
  file exists, its size and its times, where the gateway's user could.

In both, it does not see what users wrote, other processes, their sockets (abstract ones included), the environment, or
another run. A gateway that runs as root first becomes user 65534.

Limited: seconds, and per process seconds of processor time and memory; processes and threads; the size of each file and
of all; open files. System calls that get round these: ``syscalls.py``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import Field

from reward_hooks.builtin.verifiable import landlock
from reward_hooks.builtin.verifiable.syscalls import syscall_filter
from swarm.concurrency import kill_group
from swarm.errors import ConfigError
from swarm.types import Model

logger = logging.getLogger(__name__)

_NOBODY = 65534
#: For a gateway that runs as root, whose own interpreter user 65534 may not be able to reach.
_SYSTEM_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
#: Links into /usr, or folders of their own on older systems.
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")
#: What an interpreter runs from: the rest of its folder may be anything, such as a project with its runs.
_PARTS = ("bin", "lib", "lib64", "pyvenv.cfg")
#: bubblewrap's own process, which counts in the program's user namespace.
_SANDBOX_PROCESSES = 1
#: Seconds for the kernel to end all processes of a run.
_END = 10.0
_PREFIXES = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]))"
_ANSWER = "/answer.py"
#: The first run only shows whether there is a sandbox, on a busy machine too, however short the runs' own limit is.
_TRIAL_SECONDS = 30.0
#: Runs the answer as the main module, then the epilogue, which the answer's code cannot read from a file. The answer
#: may give names such as ``open`` another meaning.
_MAIN = f"""\
def __run__(exec=exec, compile=compile, open=open, names=globals()):
    # read and closed before the answer runs, so that no descriptor leads to it
    with open(EPILOGUE, encoding="utf-8") as file:
        epilogue = compile(file.read(), "<test>", "exec")
    exec(compile(open({_ANSWER!r}, encoding="utf-8").read(), {_ANSWER!r}, "exec"), names)
    exec(epilogue, names)
__file__ = {_ANSWER!r}
__import__("sys").argv[:] = [__file__]
__run__()
"""
#: Runs :mod:`reward_hooks.builtin.verifiable.landlock` as a program of its own.
_CONFINE = Path(landlock.__file__).read_text(encoding="utf-8")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_CURE = (
    "code needs bubblewrap and user namespaces, or Linux 6.12 with Landlock. Install bubblewrap (apt-get install "
    "bubblewrap, dnf install bubblewrap) and allow user namespaces (sysctl user.max_user_namespaces; "
    "kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; in a container, a seccomp profile that permits them), "
    "or set unsafe: true, which runs every answer with the rights of the gateway's user"
)


class Form(StrEnum):
    """What keeps a program in."""

    NAMESPACES = "namespaces"
    LANDLOCK = "Landlock"
    NOTHING = "nothing"


class Limits(Model):
    """Limits of one run. ``processes`` includes threads; ``memory_bytes`` is address space, per process; ``disk_bytes``
    is for all files in each of ``/tmp`` and ``/dev/shm``, which are memory too."""

    seconds: float = Field(default=10.0, gt=0, le=600)
    cpu_seconds: int = Field(default=5, ge=1)
    memory_bytes: int = Field(default=1 << 30, ge=1 << 26)
    file_bytes: int = Field(default=1 << 20, ge=1 << 10)
    disk_bytes: int = Field(default=1 << 25, ge=1 << 12)
    open_files: int = Field(default=64, ge=8)
    processes: int = Field(default=1, ge=1)


class Finished(Model):
    """How a run ended: ``status`` is the exit status, 128 + signal, or ``None`` if it was killed at its deadline.

    ``output``, ``errors`` and ``result`` are the text of standard output, of standard error and of what the epilogue
    wrote, each cut at ``file_bytes``. All of them are the program's own words.
    """

    status: int | None
    output: str
    errors: str
    result: str


class Sandbox:
    """Runs programs; safe for concurrent use from several threads.

    Args:
        limits: of each run.
        python: the interpreter that runs programs. Default: the gateway's own, or the system's if the gateway runs as
            root in a place that only root may enter.
        unsafe: also run where there is no sandbox: with the rights of the gateway's user (of 65534 for root), the
            network, and files and processes that may outlive the run. Only for trusted programs.

    Raises:
        ConfigError: there is no sandbox here (``no_sandbox``), with the reason and the cure.
    """

    def __init__(self, limits: Limits | None = None, *, python: str | None = None, unsafe: bool = False) -> None:
        self._limits = limits or Limits()
        self._user = _NOBODY if os.geteuid() == 0 else None
        pythons = [python] if python else [sys.executable, *(_SYSTEM_PYTHONS if self._user is not None else ())]
        reasons: list[str] = []
        for self.form in (Form.NAMESPACES, Form.LANDLOCK, *((Form.NOTHING,) if unsafe else ())):
            try:
                self._choose(pythons)
            except OSError as exc:
                reasons.append(f"{self.form}: {exc}")
            else:
                break
        else:
            raise ConfigError(f"cannot run code in a sandbox: {'; '.join(reasons)}. {_CURE}", code="no_sandbox")
        if self.form is Form.LANDLOCK:
            logger.info("code runs with Landlock, without files, processes and threads of its own; %s", reasons[0])
        elif self.form is Form.NOTHING:
            user = os.geteuid() if self._user is None else self._user
            logger.warning("code runs WITHOUT A SANDBOX, with the rights of user %d: %s", user, "; ".join(reasons))

    def run(
        self, program: str, standard_input: str = "", *, epilogue: str = "", seconds: float | None = None
    ) -> Finished:
        """Run Python source text with ``standard_input`` as standard input.

        Args:
            program: source of a main module; it can import the standard library and installed packages.
            standard_input: text of standard input.
            epilogue: source that runs in the same module after the program; what it writes to the open file with the
                number ``__result__`` is the result.
            seconds: in place of the limit.

        Raises:
            OSError: no sandbox could be made.
        """
        deadline = time.monotonic() + (self._limits.seconds if seconds is None else seconds)
        with contextlib.ExitStack() as stack:
            source, stdin, stdout, stderr, result, status, filtered = (
                stack.enter_context(_memory(text)) for text in (program, standard_input, "", "", "", "", self._filter)
            )
            after = stack.enter_context(_memory(f"__result__ = {result.fileno()}\n{epilogue}"))
            inherited = [after, result, source]
            answer, folder = f"/proc/self/fd/{source.fileno()}", "/"
            if self.form is Form.NAMESPACES:
                answer = _ANSWER
            elif self.form is Form.NOTHING:
                folder = stack.enter_context(_folder(self._user))
            command = [self._python, "-I", "-B", "-X", "utf8"]
            if epilogue:
                command += ["-c", _MAIN.replace("EPILOGUE", str(after.fileno())).replace(_ANSWER, answer)]
            else:
                command += [answer]
            if self.form is Form.LANDLOCK:
                command = [*self._landlock(status, filtered), *command]
            command = [*self._limited(), *command]
            if self.form is Form.NAMESPACES:
                command = [*self._bubblewrap(source, status, filtered), *command]
            if self.form is not Form.NOTHING:
                inherited += [status, filtered]
            with subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[file.fileno() for file in inherited],
                cwd=folder,
                # numpy's library starts a thread per processor, and where it may not, it interrupts the program
                env={"OMP_NUM_THREADS": str(self._limits.processes)},
                start_new_session=True,
                user=self._user,
                group=self._user,
                extra_groups=None if self._user is None else [],
            ) as process:
                late = self._wait(process, deadline)
            report = _text(status, 1 << 16)
            if self.form is Form.NAMESPACES:
                _wait_for_namespace(report)
            code = process.returncode
            made = {Form.NAMESPACES: '"exit-code"', Form.LANDLOCK: "confined", Form.NOTHING: ""}[self.form]
            if not late and made not in report:
                raise OSError(_text(stderr, 1000).strip()[-300:] or f"no sandbox was made: status {code}")
            if code < 0:
                code = 128 - code
            return Finished(
                status=None if late else code,
                output=_text(stdout, self._limits.file_bytes),
                errors=_text(stderr, self._limits.file_bytes),
                result=_text(result, self._limits.file_bytes),
            )

    def _choose(self, pythons: list[str]) -> None:
        """Take the first interpreter that runs.

        Raises:
            OSError: none does, with what each says.
            ConfigError: root is bound to be root.
        """
        _program("prlimit")
        if self.form is Form.NAMESPACES:
            _program("bwrap")
        if self.form is Form.LANDLOCK and self._limits.processes > 1:
            raise OSError("a program that may have several processes needs namespaces")
        self._filter = b"" if self.form is Form.NOTHING else syscall_filter(alone=self.form is Form.LANDLOCK)
        if not self._filter and self.form is not Form.NOTHING:
            raise OSError(f"the system calls of {platform.machine()} are not known")
        reasons: list[str] = []
        for self._python in pythons:
            try:
                self._prefixes = _prefixes(self._python, self._user)
                finished = self.run("import sys; sys.stdout.write('ready')", seconds=_TRIAL_SECONDS)
            except (OSError, subprocess.TimeoutExpired) as exc:
                if self._user is not None and getattr(exc, "errno", None) == errno.EPERM:
                    raise ConfigError(
                        f"cannot run code in a sandbox: root may not become user {self._user} here: run the gateway as "
                        "another user, or give it CAP_SETUID and CAP_SETGID",
                        code="no_sandbox",
                    ) from exc
                reasons.append(str(exc))
                continue
            if finished.output == "ready":
                return
            reasons.append(finished.errors.strip()[-300:] or f"{self._python} ended with {finished.status}")
        raise OSError("; ".join(reasons))

    def _bubblewrap(self, source: BinaryIO, status: BinaryIO, filtered: BinaryIO) -> list[str]:
        size = ["--size", str(self._limits.disk_bytes), "--tmpfs"]
        command = [_program("bwrap"), "--die-with-parent", "--new-session", "--hostname", "sandbox"]
        command += ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        command += ["--unshare-cgroup-try", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]
        command += ["--json-status-fd", str(status.fileno()), "--seccomp", str(filtered.fileno())]
        command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", *size, "/dev/shm", *size, "/tmp"]
        command += ["--ro-bind", "/usr", "/usr"]
        for folder in map(Path, _SYSTEM_FOLDERS):
            if folder.is_symlink():
                command += ["--symlink", str(folder.readlink()), str(folder)]
            elif folder.is_dir():
                command += ["--ro-bind", str(folder), str(folder)]
        for path in _SYSTEM_FILES:
            command += ["--ro-bind-try", path, path]
        for path in self._prefixes:
            command += ["--ro-bind", path, path]
        command += ["--ro-bind-data", str(source.fileno()), _ANSWER, "--remount-ro", "/", "--chdir", "/tmp", "--"]
        return command

    def _landlock(self, status: BinaryIO, filtered: BinaryIO) -> list[str]:
        readable = ["/usr", *_SYSTEM_FOLDERS, *_SYSTEM_FILES, *self._prefixes, *_DEVICES]
        settings = json.dumps([readable, filtered.fileno(), status.fileno()])
        return [self._python, "-I", "-S", "-B", "-c", _CONFINE, settings]

    def _wait(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        """Wait for the program; whether it was late, and killed."""
        late = False
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if process.returncode is None or self.form is Form.NOTHING:
                # the group: without a sandbox, what a program left running in it goes on
                kill_group(process.pid)
        process.wait(_END)
        return late

    def _limited(self) -> list[str]:
        limits = {
            "cpu": self._limits.cpu_seconds,
            "as": self._limits.memory_bytes,
            "fsize": self._limits.file_bytes,
            "nofile": self._limits.open_files,
            "core": 0,
        }
        if self.form is Form.NAMESPACES:
            # elsewhere it would count all processes of the user
            limits["nproc"] = self._limits.processes + _SANDBOX_PROCESSES
        return [_program("prlimit"), *(f"--{name}={value}:{value}" for name, value in limits.items()), "--"]


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise OSError(f"{name} is not installed")
    return path


def _prefixes(python: str, user: int | None) -> list[str]:
    """The files and folders outside of ``/usr`` that the interpreter needs.

    Raises:
        OSError: it does not run, or they hold more than an interpreter.
    """
    asked = subprocess.run(
        [python, "-I", "-c", _PREFIXES],
        capture_output=True,
        cwd="/",
        env={},
        timeout=_END,
        check=False,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )
    if asked.returncode:
        raise OSError(f"{python} does not run: {asked.stderr.decode('utf-8', 'replace').strip()[-300:]}")
    folders = {Path(path) for path in json.loads(asked.stdout)}
    folders |= {folder.resolve() for folder in folders}
    # not Path.home(), which fails for a user without a name
    home = Path(os.path.expanduser("~")).resolve()
    for folder in folders:
        if home.is_relative_to(folder) and folder != Path("/usr"):
            raise OSError(f"the folder of {python}, {folder}, holds the user's home: use an interpreter of its own")
    parts = [folder / part for folder in folders if not folder.is_relative_to("/usr") for part in _PARTS]
    # the shorter ones first: a mount covers what was mounted below
    return sorted(str(part) for part in parts if part.exists())


@contextlib.contextmanager
def _memory(content: str | bytes) -> Generator[BinaryIO]:
    """A file in memory, at its start."""
    with os.fdopen(os.memfd_create("sandbox"), "w+b") as file:
        file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)
        file.seek(0)
        yield file


@contextlib.contextmanager
def _folder(user: int | None) -> Generator[str]:
    """A folder for a program without a sandbox; what it leaves there is removed as far as that is possible."""
    folder = tempfile.mkdtemp(prefix="unsafe-")
    if user is not None:
        os.chown(folder, user, user)
    try:
        yield folder
    finally:
        # the standard library's recursion ends at a thousand folders
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


def _wait_for_namespace(status: str) -> None:
    """Wait for the first process of a namespace, which ends with bwrap, and after all others of the namespace."""
    entries: list[Any] = [json.loads(line) for line in status.splitlines() if line.startswith("{")]
    for entry in entries:
        if "child-pid" in entry:
            with contextlib.suppress(ProcessLookupError):
                first = os.pidfd_open(entry["child-pid"])
                try:
                    # not select(), which knows files below 1,024 alone
                    ended = select.poll()
                    ended.register(first, select.POLLIN)
                    ended.poll(_END * 1000)
                    # it is ours where no other process collects orphans: in a container without an init
                    with contextlib.suppress(ChildProcessError):
                        os.waitid(os.P_PIDFD, first, os.WEXITED | os.WNOHANG)
                finally:
                    os.close(first)


def _text(file: BinaryIO, most: int) -> str:
    return os.pread(file.fileno(), most, 0).decode("utf-8", "replace")
