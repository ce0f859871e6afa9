"""What a judge gives to places is told apart from what it gives to answers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_hooks.judges.listwise import freed, orders_of

SIZES = st.integers(1, 16)
SEEDS = st.integers(0, 10_000)


def scored(orders: list[list[int]], qualities: list[float], effects: list[float]) -> list[list[float]]:
    scores = [[0.0] * len(qualities) for _ in orders]
    for order, one in zip(orders, scores, strict=True):
        for place, item in enumerate(order):
            one[item] = qualities[item] + effects[place]
    return scores


def drawn(size: int, seed: int) -> tuple[list[int], list[float], list[float]]:
    draw = random.Random(seed)
    qualities = [draw.uniform(0, 9) for _ in range(size)]
    return draw.sample(range(size), size), qualities, [draw.uniform(-3, 3) for _ in range(size)]


@given(SIZES, st.integers(1, 8), SEEDS)
def test_each_order_holds_every_item_and_no_two_are_alike(size: int, count: int, seed: int) -> None:
    first, _, _ = drawn(size, seed)
    orders = orders_of(first, count)
    assert len(orders) == min(size, count)
    assert orders[0] == first
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)


@given(SIZES.filter(lambda size: size >= 3), st.integers(3, 8), SEEDS)
def test_three_orders_or_more_free_the_scores_of_any_effect_of_places(size: int, count: int, seed: int) -> None:
    first, qualities, effects = drawn(size, seed)
    orders = orders_of(first, count)
    found, told = freed(orders, scored(orders, qualities, effects))
    level = sum(effects) / size
    assert found == pytest.approx([quality + level for quality in qualities], abs=1e-6)
    assert told == pytest.approx([effect - level for effect in effects], abs=1e-6)


@given(st.integers(2, 16), SEEDS)
def test_an_order_and_its_reverse_cancel_an_even_slope(size: int, seed: int) -> None:
    first, qualities, _ = drawn(size, seed)
    orders = orders_of(first, 2)
    found, told = freed(orders, scored(orders, qualities, [0.5 * place for place in range(size)]))
    level = 0.25 * (size - 1)
    assert found == pytest.approx([quality + level for quality in qualities])
    assert told == [0.0] * size


def test_one_order_is_not_corrected() -> None:
    assert freed(orders_of([1, 0, 2], 1), [[1.0, 5.0, 2.0]]) == ([1.0, 5.0, 2.0], [0.0, 0.0, 0.0])


def test_noise_is_no_larger_than_in_one_order() -> None:
    draw = random.Random(3)
    off: dict[int, float] = {}
    for count in (1, 3):
        errors = 0.0
        for _ in range(400):
            orders = orders_of(draw.sample(range(8), 8), count)
            found, _ = freed(orders, [[draw.gauss(0, 1) for _ in range(8)] for _ in orders])
            mean = sum(found) / 8
            errors += sum((one - mean) ** 2 for one in found)
        off[count] = errors
    assert off[3] < 0.75 * off[1]
