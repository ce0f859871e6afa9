"""Output of a process whose log may be on a full disk: what the disk refuses is lost, and ends nothing.

Invariant: a ``print`` or a progress bar, of verl or of a user's code, raises no :class:`OSError`.
"""

from __future__ import annotations

import io
import sys


class _Sparing(io.FileIO):
    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def spare_output() -> None:
    """Let this process print as before, and lose what cannot be written."""
    for name in ("stdout", "stderr"):
        raw = _Sparing(getattr(sys, name).fileno(), "wb", closefd=False)
        text = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)  # type: ignore[arg-type]
        setattr(sys, name, text)
