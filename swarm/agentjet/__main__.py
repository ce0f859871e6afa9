"""``python -m swarm.agentjet SCRIPT [ARGUMENT ...]``, or ``-m MODULE``: runs what was written for AgentJet.

Invariant: the script sees ``sys.argv`` and ``sys.path`` as if ``python`` itself had started it.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from swarm.agentjet import install

_USAGE = "usage: python -m swarm.agentjet SCRIPT [ARGUMENT ...], or python -m swarm.agentjet -m MODULE [ARGUMENT ...]"


def main(arguments: list[str]) -> None:
    """Run the script or the module that ``arguments`` begin with."""
    is_module = arguments[:1] == ["-m"]
    target, *rest = arguments[is_module:] or [""]
    if not target or target.startswith("-"):
        sys.exit(_USAGE)
    if not is_module and not Path(target).exists():
        sys.exit(f"swarm.agentjet: there is no file {target}; {_USAGE}")
    sys.argv = [target, *rest]
    if not is_module:
        # python -m puts the working directory there; a script imports what lies beside it
        sys.path[0] = str(Path(target).resolve().parent)
    if not install():
        print("swarm.agentjet: AgentJet itself is installed, so the script uses that", file=sys.stderr)
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
