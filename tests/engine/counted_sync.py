"""Counts what a real engine's vLLM gets at each weight sync: a ``worker_extension_cls``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from adapters.verl.vllm_extension import SwarmWorkerExtension


class CountedSync(SwarmWorkerExtension):
    """Writes a line with the bytes of each load into the run folder."""

    def _update_weights(self, weights: list[tuple[str, Any]], *args: Any, **kwargs: Any) -> None:
        with (Path(os.environ["SWARM_RUN_DIR"]) / "synced.txt").open("a") as file:
            file.write(f"{sum(tensor.nbytes for _, tensor in weights)}\n")
        super()._update_weights(weights, *args, **kwargs)
