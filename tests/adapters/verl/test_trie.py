"""Tries of rows, their parts and what they are estimated to cost."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.verl.tree.trie import (
    PART_TOKENS,
    ModelShape,
    Ordered,
    build,
    ordered,
    pack,
    part_cost,
    rows_cost,
    split,
)
from tests.adapters.verl.token_trees import token_rows

SMOLLM2 = ModelShape(parameters=106_000_000, hidden=576, vocabulary=49152, layers=30, attention=576)
TINY = ModelShape(parameters=260_000, hidden=128, vocabulary=320, layers=2, attention=128)


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, np.int64) for row in rows]


def prefixes(rows: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)}


@given(token_rows)
def test_a_trie_holds_every_common_prefix_once(rows: list[list[int]]) -> None:
    trie = build(arrays(rows))
    for row, place in zip(rows, trie.rows, strict=True):
        assert trie.ids[place].tolist() == row
        assert trie.positions[place].tolist() == list(range(len(row)))
    assert len(trie.ids) == len(prefixes(rows))


@given(token_rows)
def test_nodes_say_which_tokens_a_token_follows(rows: list[list[int]]) -> None:
    trie = build(arrays(rows))
    size = len(trie.ids)
    wanted = np.zeros((size, size), bool)
    for place in trie.rows:
        for at, token in enumerate(place):
            wanted[token, place[: at + 1]] = True
    found = np.zeros((size, size), bool)
    for start, stop, end, parent in trie.nodes:
        for token in range(start, end):
            found[token, start : min(stop, token + 1)] = True
        if parent >= 0:
            assert trie.nodes[parent].stop <= start < end <= trie.nodes[parent].end
    assert (found == wanted).all()
    assert [token for node in trie.nodes for token in range(node.start, node.stop)] == list(range(size))


@given(token_rows, st.integers(1, 60), st.integers(1, 8))
def test_parts_keep_the_budget_at_the_least_cost(rows: list[list[int]], budget: int, at_least: int) -> None:
    layout = ordered(arrays(rows))
    parts = split(layout, budget)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    assert all(len(part) == 1 or unique(rows, part) <= budget for part in parts)
    assert total(rows, parts) == min(total(rows, one) for one in every_split(rows, layout, budget))
    more = split(layout, budget, min(at_least, len(rows)))
    assert len(more) == max(len(parts), min(at_least, len(rows)))
    assert all(len(part) == 1 or unique(rows, part) <= budget for part in more)


def unique(rows: list[list[int]], part: list[int]) -> int:
    return len(prefixes([rows[row] for row in part]))


def total(rows: list[list[int]], parts: list[list[int]]) -> int:
    return sum(unique(rows, part) + PART_TOKENS for part in parts)


def every_split(rows: list[list[int]], layout: Ordered, budget: int) -> list[list[list[int]]]:
    """All ways to cut the ordered rows into parts within the budget."""
    count = len(rows)
    found: list[list[list[int]]] = []
    for cuts in (cuts for size in range(count) for cuts in combinations(range(1, count), size)):
        parts = [layout.order[begin:end] for begin, end in pairwise([0, *cuts, count])]
        if all(len(part) == 1 or unique(rows, part) <= budget for part in parts):
            found.append(parts)
    return found


def test_cuts_lie_between_groups() -> None:
    prompts = [[1] * 50, [2] * 50, [3] * 50]
    rows = arrays([prompt + [number] * 10 for number in range(4) for prompt in prompts])
    parts = split(ordered(rows), 200)
    assert len(parts) == 2
    assert all({row % 3 for row in one}.isdisjoint({row % 3 for row in other}) for one, other in combinations(parts, 2))


@given(token_rows, st.randoms(use_true_random=False))
def test_sampled_tokens_find_their_way_back(rows: list[list[int]], chance: random.Random) -> None:
    sampled = [np.flatnonzero([0, *(chance.randint(0, 1) for _ in row[1:])]) for row in rows]
    members = list(range(len(rows)))[::-1]
    part = pack(arrays(rows), sampled, members)
    flat = [token for row in members for token in rows[row]]
    offsets = np.cumsum([0, *(len(rows[row]) for row in members)])
    wanted = [offset + at - 1 for offset, row in zip(offsets, members, strict=False) for at in sampled[row]]
    assert part.targets.tolist() == wanted
    assert [flat[target + 1] for target in part.targets] == part.labels.tolist()
    assert [flat[target] for target in part.targets] == part.trie.ids[part.needed[part.index]].tolist()
    assert part.needed.tolist() == sorted(set(part.needed.tolist()))


def answers(prompt: int, answer: int, shared: bool) -> list[list[int]]:
    chance = np.random.default_rng(0)
    common = chance.integers(0, 1000, prompt).tolist()
    prompts = [common if shared else chance.integers(0, 1000, prompt).tolist() for _ in range(8)]
    return [begin + chance.integers(0, 1000, answer).tolist() for begin in prompts]


def estimate(shape: ModelShape, rows: list[list[int]], prompt: int) -> float:
    """How many times as much padded rows cost."""
    sampled = [np.arange(prompt, len(row)) for row in rows]
    part = pack(arrays(rows), sampled, list(range(len(rows))))
    return rows_cost(shape, [len(row) for row in rows], 4) / part_cost(shape, part)


def test_rows_one_after_another_cost_less_than_padded_ones() -> None:
    even, uneven = [100] * 8, [100, 20] * 4
    apart, masked, padded = (rows_cost(SMOLLM2, uneven, 4, layout) for layout in ("apart", "masked", "padded"))
    assert apart < masked < 0.7 * padded and padded == rows_cost(SMOLLM2, even, 4)


@pytest.mark.parametrize(
    ("prompt", "answer", "shared", "least", "most"),
    [(512, 64, True, 4.5, 7.0), (512, 128, True, 3.3, 5.0), (128, 64, True, 2.3, 3.5), (512, 64, False, 1.0, 1.6)],
)
def test_estimates_are_near_what_was_measured(
    prompt: int, answer: int, shared: bool, least: float, most: float
) -> None:
    assert least < estimate(SMOLLM2, answers(prompt, answer, shared), prompt) < most


def test_short_rows_of_a_small_model_are_not_packed() -> None:
    assert estimate(TINY, answers(1, 3, True), 1) < 1 < estimate(TINY, answers(500, 100, True), 500)
