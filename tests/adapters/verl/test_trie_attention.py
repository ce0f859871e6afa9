"""Attention over tries and log-probabilities from logits, held against what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs the cpu extra")

from torch.nn.attention import flex_attention  # noqa: E402

from adapters.verl.tree import attention  # noqa: E402
from adapters.verl.tree.attention import Nodes, UnsupportedAttentionError, trie_attention  # noqa: E402
from adapters.verl.tree.trie import Trie, build  # noqa: E402
from tests.adapters.verl.token_trees import token_rows  # noqa: E402

HEADS, KEY_HEADS, WIDTH = 6, 2, 16


def masked_attention(query, key, value, trie: Trie):
    """Every token sees the tokens before it in its rows, by a mask."""
    size = len(trie.ids)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for place in trie.rows:
        for at, token in enumerate(place):
            seen[token, torch.from_numpy(place[: at + 1])] = True
    key, value = (one.repeat_interleave(HEADS // KEY_HEADS, 1) for one in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("way", [attention.attend_by_nodes, attention.attend_by_mask])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=token_rows, seed=st.integers(0, 1000))
def test_both_ways_equal_masked_attention(
    monkeypatch: pytest.MonkeyPatch, way: Callable[..., Any], rows: list[list[int]], seed: int
) -> None:
    monkeypatch.setitem(attention.ATTEND, "cpu", way)
    # torch refuses to compile this backward pass for a CPU, and refuses what it could compute as well
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    trie = build([np.array(row) for row in rows])
    torch.manual_seed(seed)
    shapes = [(HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, WIDTH)]
    inputs = [torch.randn(1, len(trie.ids), *shape).transpose(1, 2).requires_grad_() for shape in shapes]
    grad = torch.randn(1, len(trie.ids), HEADS, WIDTH)
    found, _ = trie_attention(torch.nn.Module(), *inputs, None, trie_nodes=Nodes(trie.nodes))
    wanted = masked_attention(*inputs, trie)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    for one, other in zip(*(torch.autograd.grad(out, inputs, grad) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("special", [{"sliding_window": 8}, {"softcap": 30.0}, {"dropout": 0.1}, {"trie_nodes": None}])
def test_attention_of_another_kind_is_refused(special: dict[str, object]) -> None:
    nothing = torch.zeros(1, 1, 1, WIDTH)
    arguments = {"trie_nodes": Nodes([])} | special
    with pytest.raises(UnsupportedAttentionError):
        trie_attention(torch.nn.Module(), nothing, nothing, nothing, None, **arguments)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("block", [7, 1000, 2**22])
def test_log_probabilities_and_entropy(
    monkeypatch: pytest.MonkeyPatch, temperature: float, with_entropy: bool, block: int
) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    torch.manual_seed(0)
    weights = torch.randn(9, 50, requires_grad=True)
    index, labels = torch.randint(0, 9, (20,)), torch.randint(0, 50, (20,))
    for_log_probs, for_entropy = torch.randn(20), torch.randn(9)

    found, entropy = attention.token_log_probs(weights * 3, index, labels, temperature, with_entropy)
    scaled = (weights * 3 / temperature).log_softmax(-1)
    wanted, wanted_entropy = scaled[index, labels], -(scaled.exp() * scaled).sum(-1)
    torch.testing.assert_close(found, wanted)
    loss, wanted_loss = (found * for_log_probs).sum(), (wanted * for_log_probs).sum()
    if with_entropy:
        torch.testing.assert_close(entropy, wanted_entropy)
        loss, wanted_loss = loss + (entropy * for_entropy).sum(), wanted_loss + (wanted_entropy * for_entropy).sum()
    else:
        assert len(entropy) == 0
    (grad,), (wanted_grad,) = torch.autograd.grad(loss, weights), torch.autograd.grad(wanted_loss, weights)
    torch.testing.assert_close(grad, wanted_grad, atol=1e-5, rtol=1e-4)


def test_no_token_is_needed() -> None:
    logits, none = torch.zeros(0, 5, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    found, entropy = attention.token_log_probs(logits * 1, none, none, 1.0, True)
    (found.sum() + entropy.sum()).backward()
    assert len(found) == len(entropy) == 0
