"""``swarm-gateway``: the composition root; every failure is one line on stderr and an exit code.

Exit codes: 0 done, 1 something that ran has failed, 2 wrong input or nothing to talk to, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from gateway.cli.output import import_from
from swarm.errors import EngineError, SwarmGatewayError
from swarm.importer import load_attribute

__all__ = ["main"]

#: Modules that Python lacks on Windows, and servers need.
_UNIX = ("fcntl", "resource")


def main(command: str = "gateway.cli.root:app") -> None:
    """Run the command line ``command`` and leave the process with its exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # it was closed by who started this, and Python has nothing there
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for the life of the process
    if hasattr(signal, "SIGCHLD"):
        # started by who ignores it, no process learns how those that it starts end
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # one of another encoding, as pipes on Windows, gets escapes, as stderr does
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        import_from(Path())
        load_attribute(command)()
    except SwarmGatewayError as exc:
        # what was asked of it was right, unless it died of its job
        _leave(exc.message, 1 if isinstance(exc, EngineError) and exc.code != "wrong_config" else 2)
    except ModuleNotFoundError as exc:
        if exc.name not in _UNIX:
            raise
        _leave("this command needs Linux or macOS; on Windows run it in WSL")
    except OSError as exc:
        # not foreseen by any command: a full disk, a folder without permission
        _leave(str(exc) or type(exc).__name__)
    except ValueError as exc:
        from pydantic import ValidationError

        if not isinstance(exc, ValidationError):
            raise
        from swarm.validation import describe_validation

        _leave(describe_validation(exc, exc.title).message)
    except KeyboardInterrupt:
        sys.exit(130)


def _leave(message: str, code: int = 2) -> NoReturn:
    from gateway.views.format import printable

    # they may be a server's words
    print(f"swarm-gateway: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)
