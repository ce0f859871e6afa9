"""The system calls that a sandboxed program may not make, as a filter for the kernel (seccomp, classic BPF).

Invariant: what namespaces and resource limits do not hold is refused by number: memory that belongs to no process
(System V IPC), keyrings, which are shared with the gateway, the kernel's log, sockets that no network namespace
confines (``AF_VSOCK`` reaches the host of a virtual machine), new user namespaces, which give every capability inside
them, and the calls that get round such a filter (io_uring) or are large targets in the kernel (bpf, perf, userfaultfd).

Without namespaces (``alone``), what Landlock does not govern is refused as well: processes and threads, all sockets,
owners, modes, times and attributes of files, limits and priorities of other processes, watching files, memory and
queues of the user, and calls that are newer than this table.

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
    prlimit64: int
    #: shmget, semget, msgget, add_key, request_key, keyctl, unshare, io_uring_setup, bpf, perf_event_open,
    #: userfaultfd, syslog
    refused: tuple[int, ...]
    #: Processes: fork, vfork, ptrace, setpriority, ioprio_set, sched_setparam, sched_setscheduler, sched_setaffinity,
    #: sched_setattr, get_robust_list, migrate_pages, move_pages, kcmp, process_vm_readv, process_vm_writev; files:
    #: access, faccessat, chmod, fchmod, fchmodat, chown, fchown, lchown, fchownat, utime, utimes, futimesat, utimensat,
    #: setxattr (3), removexattr (3), inotify_init, inotify_init1, fanotify_init, quotactl, acct, name_to_handle_at,
    #: open_by_handle_at; memory and queues of the user: shmat, shmctl, semop, semctl, semtimedop, msgsnd, msgrcv,
    #: msgctl, mq_open, mq_unlink. Those without a number on a machine are left out.
    alone: tuple[int, ...]


_MACHINES = {
    "x86_64": _Machine(
        *(0xC000003E, 56, 435, 41, 302),
        (29, 64, 68, 248, 249, 250, 272, 425, 321, 298, 323, 103),
        (
            *(57, 58, 101, 141, 251, 142, 144, 203, 314, 274, 256, 279, 312, 310, 311),
            *(21, 269, 90, 91, 268, 92, 93, 94, 260, 132, 235, 261, 280, 188, 189, 190, 197, 198, 199),
            *(253, 294, 300, 179, 163, 303, 304, 30, 31, 65, 66, 220, 69, 70, 71, 240, 241),
        ),
    ),
    "aarch64": _Machine(
        *(0xC00000B7, 220, 435, 198, 261),
        (194, 190, 186, 217, 218, 219, 97, 425, 280, 241, 282, 116),
        (
            *(117, 140, 30, 118, 119, 122, 274, 100, 238, 239, 272, 270, 271),
            *(48, 52, 53, 55, 54, 88, 5, 6, 7, 14, 15, 16),
            *(26, 262, 60, 89, 264, 265, 196, 195, 193, 191, 192, 189, 188, 187, 180, 181),
        ),
    ),
}
#: Those with the same number everywhere: pidfd_send_signal, pidfd_open, pidfd_getfd, faccessat2,
#: process_madvise, quotactl_fd, process_mrelease, fchmodat2, setxattrat, removexattrat, file_setattr.
_ALONE_EVERYWHERE = (424, 434, 438, 439, 440, 443, 448, 452, 463, 466, 469)
#: The first number that this table does not know (Linux 6.17).
_UNKNOWN = 470


def syscall_filter(*, alone: bool) -> bytes:
    """The filter for this machine, as the kernel and ``bwrap --seccomp`` read it; empty for a kind that is not known.

    Args:
        alone: for a program that has no namespaces of its own.
    """
    calls = _MACHINES.get(platform.machine())
    if calls is None:
        return b""
    refused = (*calls.refused, *calls.alone, *_ALONE_EVERYWHERE) if alone else calls.refused
    return b"".join(
        (
            _op(_LOAD, _ARCHITECTURE),
            _op(_JUMP_EQUAL, calls.architecture, 1, 0),
            _op(_RETURN, _KILL_PROCESS),
            _op(_LOAD, _NUMBER),
            _op(_JUMP_AT_LEAST, _UNKNOWN if alone else _X32, 0, 1),
            _refuse(errno.ENOSYS),
            *(_if_call(number, _refuse(errno.EPERM)) for number in refused),
            # its arguments lie in memory, which a filter cannot read; without it, the C library uses clone
            _if_call(calls.clone3, _refuse(errno.ENOSYS)),
            *(_alone(calls) if alone else ()),
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


def _alone(calls: _Machine) -> tuple[bytes, ...]:
    """No process or thread, no socket, and no limits but the process's own."""
    return (
        _if_call(calls.clone, _refuse(errno.EAGAIN)),
        _if_call(calls.socket, _refuse(errno.EAFNOSUPPORT)),
        _if_call(
            calls.prlimit64,
            _op(_LOAD, _FIRST_ARGUMENT),
            _op(_JUMP_EQUAL, 0, 1, 0),
            _refuse(errno.EPERM),
            _op(_RETURN, _ALLOW),
        ),
    )


def _if_call(number: int, *then: bytes) -> bytes:
    """``then``, which ends with a return, if the call has this number."""
    return b"".join((_op(_JUMP_EQUAL, number, 0, len(then)), *then))


def _refuse(error: int) -> bytes:
    return _op(_RETURN, _ERRNO | error)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
