"""Random bytes for keys and names without a system call for each.

Each call of ``os.urandom`` lets go of the interpreter's lock, and a busy server then waits for it longer than for the
bytes. Invariant: every byte comes from ``os.urandom`` and is given out once, whatever thread or forked process asks.
"""

from __future__ import annotations

import os
import threading

_CHUNK = 8192


class Entropy:
    """``os.urandom`` by the chunk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = b""
        self._used = 0

    def take(self, count: int) -> bytes:
        """``count`` random bytes, at most a few dozen."""
        with self._lock:
            if self._used + count > len(self._chunk):
                self._chunk = os.urandom(_CHUNK + count)
                self._used = 0
            taken = self._chunk[self._used : self._used + count]
            self._used += count
        return taken

    def forget(self) -> None:
        """Give out nothing of what is left, which another process has as well."""
        self._lock = threading.Lock()
        self._chunk = b""
        self._used = 0


_entropy = Entropy()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_entropy.forget)

#: see :meth:`Entropy.take`
random_bytes = _entropy.take
