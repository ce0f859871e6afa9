"""The system calls that a sandboxed program may not make, as a filter for the kernel (seccomp, classic BPF).

Invariant: what namespaces and resource limits do not hold is refused by number: memory that belongs to no process
(System V IPC), keyrings, which are shared with the gateway, sockets that no network namespace confines (``AF_VSOCK``
reaches the host of a virtual machine), new user namespaces, which give every capability inside them, and the calls that
get round such a filter (io_uring) or are large targets in the kernel (bpf, perf, userfaultfd).

Layout and actions: Linux, Documentation/userspace-api/seccomp_filter.rst. Call numbers: the kernel's syscall tables.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from dataclasses import dataclass

_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
#: Offsets in ``struct seccomp_data``: the call's number, the architecture, the low half of the first argument.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_CLONE_NEWUSER = 0x10000000
#: Bit of the x32 calls, which an x86-64 kernel also takes.
_X32 = 0x40000000
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True)
class _Machine:
    architecture: int
    clone: int
    clone3: int
    socket: int
    #: shmget, semget, msgget, add_key, request_key, keyctl, unshare, io_uring_setup, bpf, perf_event_open, userfaultfd
    refused: tuple[int, ...]


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 56, 435, 41, (29, 64, 68, 248, 249, 250, 272, 425, 321, 298, 323)),
    "aarch64": _Machine(0xC00000B7, 220, 435, 198, (194, 190, 186, 217, 218, 219, 97, 425, 280, 241, 282)),
}


def syscall_filter(machine: str = "") -> bytes:
    """The filter for ``machine`` (default: this one), as ``bwrap --seccomp`` reads it; empty for an unknown machine."""
    calls = _MACHINES.get(machine or platform.machine())
    if calls is None:
        return b""
    return b"".join(
        (
            _op(_LOAD, _ARCHITECTURE),
            _op(_JUMP_EQUAL, calls.architecture, 1, 0),
            _op(_RETURN, _KILL_PROCESS),
            _op(_LOAD, _NUMBER),
            _op(_JUMP_AT_LEAST, _X32, 0, 1),
            _refuse(errno.ENOSYS),
            *(_if_call(number, _refuse(errno.EPERM)) for number in calls.refused),
            # its arguments lie in memory, which a filter cannot read; without it, the C library uses clone
            _if_call(calls.clone3, _refuse(errno.ENOSYS)),
            _if_call(
                calls.clone,
                _op(_LOAD, _FIRST_ARGUMENT),
                _op(_JUMP_SET, _CLONE_NEWUSER, 0, 1),
                _refuse(errno.EPERM),
                _op(_RETURN, _ALLOW),
            ),
            _if_call(
                calls.socket,
                _op(_LOAD, _FIRST_ARGUMENT),
                *(_op(_JUMP_EQUAL, family, len(_FAMILIES) - index, 0) for index, family in enumerate(_FAMILIES)),
                _refuse(errno.EAFNOSUPPORT),
                _op(_RETURN, _ALLOW),
            ),
            _op(_RETURN, _ALLOW),
        )
    )


def _if_call(number: int, *then: bytes) -> bytes:
    """``then``, which ends with a return, if the call has this number."""
    return b"".join((_op(_JUMP_EQUAL, number, 0, len(then)), *then))


def _refuse(error: int) -> bytes:
    return _op(_RETURN, _ERRNO | error)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
