"""Adapters in vLLM on a CPU: one product of matrices for each adapter of a batch.

Invariant: each token gets its own request's adapter, and none where its request has none.

vLLM's own product gathers both matrices anew for every token: a prompt takes several times as long, and rank x width
numbers for each of its tokens. It also gives the last adapter to a token that has none (vllm#48421).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class DenseLora(PunicaWrapperCPU):
    """vLLM's wrapper, for linear layers; a layer of another kind is computed as vLLM does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # each adapter of the batch with the tokens that it has; None: all
        self._tokens: list[tuple[int, torch.Tensor | None]] = []

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        indices = self.token_lora_indices
        adapters: list[int] = indices.unique().tolist()
        if len(adapters) == 1:
            self._tokens = [(adapters[0], None)]
        else:
            self._tokens = [(adapter, (indices == adapter).nonzero()[:, 0]) for adapter in adapters]
        self._tokens = [(adapter, tokens) for adapter, tokens in self._tokens if adapter >= 0]

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the adapters' products to ``y`` [T, sum of ``output_slices``] for ``x`` [T, in]; of each slice the
        matrices are [adapters, 1, rank, in] and [adapters, 1, out, rank]."""
        for adapter, tokens in self._tokens:
            inputs = x if tokens is None else x[tokens]
            begin = 0
            for down, up, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                added = inputs @ down[adapter, 0].T @ up[adapter, 0].T
                columns = y[:, begin : begin + width]
                if tokens is None:
                    columns.add_(added, alpha=scale)
                else:
                    columns.index_add_(0, tokens, added, alpha=scale)
                begin += width
