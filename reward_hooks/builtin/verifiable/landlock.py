"""Run a command that can read some files, and nothing else: Landlock and a filter of system calls, without namespaces.

Started as a program, as ``python -c SOURCE SETTINGS COMMAND...``: what it sets holds for itself and the command, and
cannot be taken back. It imports the standard library alone, since the gateway's own folders may be out of its reach.

Layout and numbers: Linux, Documentation/userspace-api/landlock.rst and include/uapi/linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys

#: The first version that confines signals and abstract UNIX sockets: Linux 6.12.
_NEEDED = 6
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
#: Every right over files of that version, binding and connecting of TCP, and both scopes.
_FILES, _NETWORK, _SCOPES = (1 << 16) - 1, 3, 3
_EXECUTE, _READ_FILE, _READ_FOLDER = 1, 4, 8
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2


def confine(readable: list[str], filtered: bytes) -> None:
    """Leave this process, and what it becomes, the reading of ``readable``, and no call that ``filtered`` refuses.

    Args:
        readable: files and folders; those that are not there are left out.
        filtered: a filter of :mod:`reward_hooks.builtin.verifiable.syscalls`.

    Raises:
        OSError: the kernel has no Landlock, or an older one.
    """
    version = _checked(_call(_CREATE_RULESET, None, 0, _VERSION), "the kernel has no Landlock")
    if version < _NEEDED:
        raise OSError(f"the kernel's Landlock has version {version}, and {_NEEDED} (Linux 6.12) is needed")
    attributes = struct.pack("QQQ", _FILES, _NETWORK, _SCOPES)
    ruleset = _checked(_call(_CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")
    for path in readable:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rights = _EXECUTE | _READ_FILE | (_READ_FOLDER if os.path.isdir(path) else 0)
        rule = struct.pack("=Qi", rights, opened)
        _checked(_call(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"landlock_add_rule of {path}")
        os.close(opened)
    control = ctypes.CDLL(None, use_errno=True).prctl
    _checked(control(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    _checked(_call(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
    operations = ctypes.create_string_buffer(filtered, len(filtered))
    program = struct.pack("HxxxxxxP", len(filtered) // 8, ctypes.addressof(operations))
    _checked(control(_SECCOMP, _FILTER, ctypes.c_char_p(program), 0, 0), "seccomp")


def _call(number: int, *arguments: int | bytes | None) -> int:
    return ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def main() -> None:
    """Confine this process and become the command; ``confined`` in ``status`` says that it did."""
    settings, *command = sys.argv[1:]
    readable, filtered, status = json.loads(settings)
    confine(readable, os.pread(filtered, 1 << 16, 0))
    os.close(filtered)
    os.write(status, b"confined")
    os.close(status)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
