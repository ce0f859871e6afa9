"""Attention over a packed trie: a token attends to the nodes on its path. And log-probabilities and entropy from its
logits, in blocks of rows, without a second tensor of the logits' size.

On a CPU, each node's keys meet the queries of its whole subtree once. Each node gives a token a part of the result,
with the log-sum-exp of its scores, by which the parts are merged: exact, without a mask, without a copy of any key. On
a GPU, FlexAttention computes the blocks in which some key's subtree holds some query. Models of transformers reach both
as the attention implementation :data:`TREE`, with the nodes in the keyword ``trie_nodes``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adapters.verl.tree.trie import Node

TREE = "swarm_trie"
#: Elements of a block of logits: 16 MiB in fp32.
BLOCK = 2**22

# the causal mask is aligned at the first query and the first key, so that queries after a node's own see all its keys;
# fewer heads of keys than of queries are taken as they are
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class UnsupportedAttentionError(NotImplementedError):
    """The model wants more of its attention than causality: a window, dropout, sinks, a cap on the scores."""


class Nodes:
    """The nodes of a trie, as one value to everything that walks through the arguments of a model."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self._mask: BlockMask | None = None

    def mask(self, device: torch.device) -> BlockMask:
        """Which packed token attends to which, for FlexAttention; all layers of a model share it."""
        if self._mask is None:
            tokens = self.nodes[-1].stop
            own = torch.tensor([node.stop - node.start for node in self.nodes], device=device)
            # for each token, where the subtree of its node ends; nodes lie side by side, in packed order
            ends = torch.tensor([node.end for node in self.nodes], device=device).repeat_interleave(own)

            def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                return (key <= query) & (query < ends[key])

            self._mask = _compiled(create_block_mask, device)(sees, None, None, tokens, tokens, device=device)
        return self._mask


class _TrieAttention(torch.autograd.Function):
    """``query`` [1, H, T, D], ``key`` and ``value`` [1, K, T, D] of packed tokens to the result [1, H, T, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, nodes: list[Node], scale: float
    ) -> torch.Tensor:
        batch, heads, tokens, width = query.shape
        # merged in fp32; in the layout that the model's next projection wants
        out = torch.empty(batch, tokens, heads, width, dtype=torch.float32).transpose(1, 2)
        total = torch.empty(batch, heads, tokens, dtype=torch.float32)
        for start, stop, end, parent in nodes:
            keys, queries = slice(start, stop), slice(start, end)
            part, part_total = _forward(
                query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, True, attn_mask=None, scale=scale
            )
            merged, merged_total = out[:, :, queries], total[:, :, queries]
            if parent < 0:
                merged.copy_(part)
                merged_total.copy_(part_total)
            else:
                both = torch.logaddexp(merged_total, part_total)
                merged.mul_((merged_total - both).exp_().unsqueeze(-1))
                merged.addcmul_(part, (part_total - both).exp_().unsqueeze(-1))
                merged_total.copy_(both)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.nodes, ctx.scale = nodes, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        (grad,) = grads
        for_query, for_key, for_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for start, stop, end, parent in ctx.nodes:
            keys, queries = slice(start, stop), slice(start, end)
            # with the log-sum-exp over all keys, the gradient of one node's keys is that of the whole
            part, for_key[:, :, keys], for_value[:, :, keys] = _backward(
                grad[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, queries],
                total[:, :, queries],
                0.0,
                True,
                attn_mask=None,
                scale=ctx.scale,
            )
            if parent < 0:
                for_query[:, :, queries] = part
            else:
                for_query[:, :, queries] += part
        return for_query, for_key, for_value, None, None


@functools.cache
def _compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    # as they are, both write out every score; a CPU has no compiled backward pass, and only tests come here with one
    return function if device.type == "cpu" else torch.compile(function, dynamic=True)


def attend_by_nodes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, nodes: Nodes, scale: float
) -> torch.Tensor:
    """As :class:`_TrieAttention`."""
    return _TrieAttention.apply(query, key, value, nodes.nodes, scale)


def attend_by_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, nodes: Nodes, scale: float
) -> torch.Tensor:
    """The same by FlexAttention."""
    attend = _compiled(flex_attention, query.device)
    # short inputs, too, by the kernel that trains and not by that of decoding: so the probe of a model tries it
    options = {"FORCE_USE_FLEX_ATTENTION": True}
    mask = nodes.mask(query.device)
    return attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=True, kernel_options=options)


#: by the type of the device
ATTEND = {"cpu": attend_by_nodes, "cuda": attend_by_mask}


def trie_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    trie_nodes: Nodes | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: ``query`` [1, H, T, D], ``key`` and ``value`` [1, K, T, D] to [1, T, H, D].

    Raises:
        UnsupportedAttentionError: the result would not be the model's own.
    """
    special = [name for name in ("sliding_window", "softcap", "s_aux") if more.get(name) is not None]
    if trie_nodes is None or attention_mask is not None or dropout or special:
        raise UnsupportedAttentionError(f"attention with {', '.join(special) or 'a mask of its own or dropout'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return ATTEND[query.device.type](query, key, value, trie_nodes, scale).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(TREE, trie_attention)


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
