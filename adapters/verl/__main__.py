"""``python -m adapters.verl JOB.yaml``: the engine's driver, or one line that says the engine is not installed."""

import sys

try:
    from adapters.verl.driver import main
except ModuleNotFoundError as exc:
    sys.exit(
        f"engine: {exc.name} is not installed; training needs verl and vLLM: on a CPU `make setup` in a clone, "
        "with GPUs `pip install 'swarm-gateway[gpu]'`"
    )

if __name__ == "__main__":
    main()
