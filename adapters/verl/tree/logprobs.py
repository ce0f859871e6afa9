"""Log-probabilities and entropy from logits in blocks of rows, without a second tensor of the logits' size."""

from __future__ import annotations

from typing import Any

import torch

#: Elements of a block: 16 MiB in fp32.
BLOCK = 2**22


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        index: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        entropy = torch.empty(len(logits) if with_entropy else 0, dtype=torch.float32, device=logits.device)
        for block in _blocks(logits):
            scaled = _scaled(logits[block], temperature)
            total[block] = torch.logsumexp(scaled, -1)
            if with_entropy:
                log_probs = scaled - total[block, None]
                entropy[block] = -(log_probs.exp() * log_probs).sum(-1)
        ctx.save_for_backward(logits, index, labels, total, entropy)
        ctx.temperature = temperature
        return _scaled(logits[index, labels], temperature) - total[index], entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, index, labels, total, entropy = ctx.saved_tensors
        for_log_probs, for_entropy = grads
        sums = torch.zeros_like(total).index_add_(0, index, for_log_probs)
        for block in _blocks(logits):
            log_probs = _scaled(logits[block], ctx.temperature) - total[block, None]
            weight = -sums[block, None]
            if len(entropy):
                weight = weight - for_entropy[block, None] * (log_probs + entropy[block, None])
            # nothing reads the logits again: their gradient takes their place
            logits[block] = log_probs.exp_().mul_(weight).div_(ctx.temperature)
        logits.index_put_((index, labels), (for_log_probs / ctx.temperature).to(logits.dtype), accumulate=True)
        return logits, None, None, None, None


def token_log_probs(
    logits: torch.Tensor, index: torch.Tensor, labels: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of ``labels`` int64 [M], each by ``logits[index]``, and the entropy of each row of logits.

    The backward pass overwrites ``logits`` by their gradient, so it runs once and nothing else may use them.

    Args:
        logits: float [N, vocabulary].
        index: int64 [M], which row each label is sampled from; a row may have any number of labels.
        labels: int64 [M], token ids.
        temperature: by which the logits are divided.
        with_entropy: compute the entropy; else its length is 0.

    Returns:
        float32 [M] and float32 [N] or [0].
    """
    return _TokenLogProbs.apply(logits, index, labels, temperature, with_entropy)


def _blocks(logits: torch.Tensor) -> list[slice]:
    rows = max(1, BLOCK // logits.shape[-1])
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits.float() if temperature == 1.0 else logits.float() / temperature
