"""A server that somebody started ends with that somebody, even one that was killed without a chance to say so."""

from __future__ import annotations

import os
import signal
import sys
import threading


def stop_with_parent() -> None:
    """Send this process SIGTERM when stdin, a pipe whose other end the parent holds, is closed."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stop-with-parent", daemon=True).start()
