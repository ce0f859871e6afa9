"""``python -m adapters.verl JOB.yaml``: the engine's driver, or one line that says what is not installed.

``--resolve`` tells verl's configuration for the job on stdin instead, without the imports of the driver.
"""

import json
import os
import platform
import sys
from importlib.util import find_spec
from typing import NoReturn

from adapters.verl import INSTALL

#: What training needs beside this package.
_NEEDED = ("hydra", "torch", "ray", "verl", "vllm")
_RESOLVES = sys.argv[1:] == ["--resolve"]


def _cannot_train(missing: list[str]) -> NoReturn:
    lacks = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    why = f"this install cannot train, for {lacks}: {INSTALL}"
    if _RESOLVES:
        print(json.dumps({"error": why}))
        sys.exit()
    sys.exit(f"engine: {why}")


if absent := [name for name in _NEEDED if find_spec(name) is None]:
    _cannot_train(absent)
try:
    if _RESOLVES:
        from adapters.verl.resolve import main
    else:
        from adapters.verl.driver import main
except ModuleNotFoundError as exc:
    if os.environ.get("SWARM_CODE"):
        sys.exit(
            f"engine: the Python module {exc.name!r} is not installed on {platform.node()}; if the synced code needs "
            f"it, install it there for {sys.executable}: code sync sends no dependencies"
        )
    _cannot_train([str(exc.name)])

if __name__ == "__main__":
    main()
