"""``python -m adapters.verl JOB.yaml``: the engine's driver, or one line that says the engine is not installed.

``--resolve`` tells verl's configuration for the job on stdin instead, without the imports of the driver.
"""

import os
import platform
import sys

try:
    if sys.argv[1:] == ["--resolve"]:
        from adapters.verl.resolve import main
    else:
        from adapters.verl.driver import main
except ModuleNotFoundError as exc:
    if os.environ.get("SWARM_CODE"):
        sys.exit(
            f"engine: the Python module {exc.name!r} is not installed on {platform.node()}; if the synced code needs "
            f"it, install it there for {sys.executable}: code sync sends no dependencies"
        )
    sys.exit(
        f"engine: {exc.name} is not installed; training needs verl and vLLM: on a CPU `make setup` in a clone, "
        "with GPUs `pip install 'swarm-gateway[gpu]'`"
    )

if __name__ == "__main__":
    main()
