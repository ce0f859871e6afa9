"""Output of a process whose log may be on a full disk: what the disk refuses is lost, and ends nothing.

Invariant: a ``print``, a progress bar or a logger, of verl or of a user's code, raises no :class:`OSError`.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping
from typing import Any


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


class SparingLoggers:
    """verl's loggers (its ``Tracking``), each by itself."""

    def __init__(self, tracking: Any) -> None:
        self._tracking = tracking

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Have each logger log the metrics of a step."""
        for name in self._tracking.logger:
            try:
                self._tracking.log(data=data, step=step, backend=[name])
            except OSError as exc:
                print(f"engine: the logger {name} has lost step {step}: {exc}", file=sys.stderr)

    def finish(self, exit_code: int) -> None:
        """Close them."""
        with contextlib.suppress(OSError):
            self._tracking.finish(exit_code=exit_code)
