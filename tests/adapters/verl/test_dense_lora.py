"""Each token of a batch gets the adapter of its request, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the cpu extra")

IN, RANK, WIDTHS, SLOTS = 24, 8, (16, 8), 2


def stacked(*shape: int) -> Any:
    return torch.randn(SLOTS, 1, *shape, generator=torch.Generator().manual_seed(sum(shape)))


DOWN = tuple(stacked(RANK, IN) * (part + 1) for part in range(len(WIDTHS)))
UP = tuple(stacked(width, RANK) for width in WIDTHS)


@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("ids", [[7] * 5, [9, 7, 7, 9, 7], [0, 7, 0, 9, 0], [0] * 5])
def test_a_token_gets_the_adapter_of_its_request_or_none(ids: list[int], prefill: bool) -> None:
    pytest.importorskip("vllm", reason="needs the cpu extra")
    from adapters.verl.dense_lora import DenseLora

    slots: list[Any] = [7, 9]
    wrapper = DenseLora(64, 64, "cpu")
    mapping: Any = SimpleNamespace(index_mapping=tuple(ids), prompt_mapping=tuple(ids), is_prefill=prefill)
    wrapper.update_metadata(mapping, slots, SLOTS, 100)
    x, y = torch.randn(len(ids), IN), torch.randn(len(ids), sum(WIDTHS))
    expected = y.clone()
    for row, one in enumerate(ids):
        if one:
            at = slots.index(one)
            added = [UP[part][at, 0] @ (DOWN[part][at, 0] @ x[row]) for part in range(len(WIDTHS))]
            expected[row] += 0.5 * torch.cat(added)
    wrapper.add_lora_linear(y, x, DOWN, UP, 0.5, WIDTHS)
    torch.testing.assert_close(y, expected)
