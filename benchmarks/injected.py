"""Weight syncs that bring other weights than those of the trainer: a ``worker_extension_cls`` of a real engine's vLLM.

Invariant: sync 0 is the trainer's; sync K brings the weights of the folder ``K`` below
:data:`~benchmarks.graded.FOLDER`, all of them, so that policy version K is policy K. A name or a shape that the folder
lacks ends the sync.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from adapters.verl.vllm_extension import SwarmWorkerExtension
from benchmarks.graded import FOLDER

_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


class Injected(SwarmWorkerExtension):
    """Counts the syncs, and replaces what each brings."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        count: int = getattr(self, "_syncs", 0)
        folder = Path(os.environ[FOLDER]) / str(count)
        self._brought = load_file(folder / "model.safetensors") if count else None
        self._syncs = count + 1
        super().update_weights_from_ipc(*args, **kwargs)

    def _update_weights(self, weights: list[tuple[str, Any]], *args: Any, **kwargs: Any) -> None:
        if self._brought is not None:
            weights = [(name, self._replaced(name, tensor)) for name, tensor in weights]
        super()._update_weights(weights, *args, **kwargs)

    def _replaced(self, name: str, tensor: Any) -> Any:
        assert self._brought is not None
        brought = self._brought[name if name in self._brought else _TIED.get(name, name)]
        assert brought.shape == tensor.shape, f"{name}: {tuple(brought.shape)}, not {tuple(tensor.shape)}"
        return brought.to(dtype=tensor.dtype, device=tensor.device)
