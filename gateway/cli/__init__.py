"""``swarm-gateway``: the composition root; every failure is one line on stderr and an exit code.

Exit codes: 0 done, 1 something that ran has failed, 2 wrong input or nothing to talk to, 130 interrupted.
"""

from __future__ import annotations

import sys

from swarm.errors import SwarmGatewayError

__all__ = ["main"]


def main() -> None:
    """Run the command line and leave the process with its exit code."""
    from gateway.cli.root import app

    try:
        app()
    except SwarmGatewayError as exc:
        print(f"swarm-gateway: {' '.join(exc.message.split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
