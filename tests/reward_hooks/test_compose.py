"""Blends: gates before weights, from YAML; a part that fails fails the whole."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_hooks import Hooks, Reward, Task, load_hooks
from reward_hooks.compose import Blend, BlendConfig, PartConfig, ranks
from reward_hooks.contract import REWARD, SUBMIT
from reward_hooks.runner import HookRunner
from swarm.errors import HookError
from tests.reward_hooks.making import CONTEXT, candidates
from tests.reward_hooks.test_loader import write_helpers

pytestmark = pytest.mark.anyio
TASK = Task(task_id="t")


def by_text(table: dict[str, float]) -> Hooks:
    return Hooks(lambda task, listed, context: [table[one.text] for one in listed])


def part(name: str, hooks: Hooks, **fields: Any) -> tuple[PartConfig, Hooks]:
    return PartConfig(hook=name, **fields), hooks


def blend_of(*parts: tuple[PartConfig, Hooks], otherwise: float = 0.0) -> Blend:
    return Blend(BlendConfig(parts=[config for config, _ in parts], otherwise=otherwise), [hooks for _, hooks in parts])


async def blended(blend: Blend, *texts: str) -> list[Reward]:
    return await blend.on_compute_relative_reward(TASK, candidates(*texts), CONTEXT)


async def test_weights_make_a_mean_and_components_keep_their_names() -> None:
    rich = Hooks(lambda task, listed, context: [Reward(value=1.0, components={"c": 2.0}, reason="fine")] * len(listed))
    rewards = await blended(
        blend_of(part("rich", rich, weight=3), part("poor", by_text({"a": 0.0, "b": 1.0}))), "a", "b"
    )
    assert [reward.value for reward in rewards] == [0.75, 1.0]
    assert rewards[0].components == {"rich": 1.0, "rich.c": 2.0, "poor": 0.0}
    assert rewards[0].reason == "rich: fine"


async def test_weighted_parts_score_only_answers_that_pass_the_gates() -> None:
    asked: list[list[str]] = []

    def quality(task: Task, listed: list[Any], context: Any) -> list[float]:
        asked.append([one.text for one in listed])
        return [0.5] * len(listed)

    blend = blend_of(
        part("first", by_text({"a": 1.0, "b": 0.0, "c": 1.0}), gate=1.0),
        part("second", by_text({"a": 0.2, "c": 0.9}), gate=0.5),
        part("quality", Hooks(quality)),
        otherwise=-1.0,
    )
    rewards = await blended(blend, "a", "b", "c")
    assert [reward.value for reward in rewards] == [-1.0, -1.0, 0.5]
    assert asked == [["c"]]
    assert rewards[0].reason.startswith("stopped by the gate second")
    assert "quality" not in rewards[0].components


async def test_an_answer_that_fails_a_gate_never_earns_more_than_others() -> None:
    gate, quality = by_text({"a": 1.0, "b": 0.0}), by_text({"a": -3.0})
    rewards = await blended(blend_of(part("gate", gate, gate=1.0), part("quality", quality)), "a", "b")
    assert [reward.value for reward in rewards] == [-3.0, -3.0]


async def test_when_nothing_passes_all_are_equal_and_no_part_runs() -> None:
    def never(*_: Any) -> list[float]:
        raise AssertionError

    blend = blend_of(part("gate", by_text({"a": 0.0, "b": 0.5}), gate=1.0), part("quality", Hooks(never)))
    assert [reward.value for reward in await blended(blend, "a", "b")] == [0.0, 0.0]


async def test_rank_takes_a_part_to_the_scale_of_the_others() -> None:
    huge, small = by_text({"a": 1e6, "b": -1e6, "c": 0.0}), by_text({"a": 0.0, "b": 1.0, "c": 0.0})
    rewards = await blended(blend_of(part("huge", huge, scale="rank"), part("small", small)), "a", "b", "c")
    assert [reward.value for reward in rewards] == [0.5, 0.5, 0.25]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_ranks_keep_order_and_ties(values: list[float]) -> None:
    ranked = ranks(values)
    assert all(0 <= rank <= 1 for rank in ranked)
    assert sum(ranked) == pytest.approx(len(values) / 2)
    for one, other in pairwise(values):
        assert (one < other) == (ranked[values.index(one)] < ranked[values.index(other)])


async def test_a_part_that_fails_fails_the_blend_with_its_code_and_cancels_the_others() -> None:
    cancelled = asyncio.Event()

    async def hangs(*_: Any) -> list[float]:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    async def refuses(*_: Any) -> list[float]:
        raise HookError("no budget left", code="judge_budget")

    blend = blend_of(part("slow", Hooks(hangs)), part("judge", Hooks(refuses, source="judge.py")))
    with pytest.raises(HookError, match=r"judge\.py.*no budget left") as caught:
        await blended(blend, "a", "b")
    assert caught.value.code == "judge_budget"
    async with asyncio.timeout(10):
        await cancelled.wait()


async def test_parts_get_the_rest_of_the_deadline() -> None:
    async def hangs(*_: Any) -> list[float]:
        await asyncio.Event().wait()
        return []

    blend, context = blend_of(part("slow", Hooks(hangs))), CONTEXT.model_copy(update={"deadline_seconds": 0.05})
    with pytest.raises(HookError) as caught:
        await blend.on_compute_relative_reward(TASK, candidates("a"), context)
    assert caught.value.code == "hook_timeout"


async def test_a_part_that_hangs_fails_at_once_when_no_thread_is_left_to_it() -> None:
    release = threading.Event()

    def hangs(*_: Any) -> list[float]:
        release.wait(60)
        return []

    blend = blend_of(part("slow", Hooks(hangs)))
    runner = HookRunner(Hooks(blend.on_compute_relative_reward))
    context = CONTEXT.model_copy(update={"deadline_seconds": 0.05})

    async def code() -> str | None:
        with pytest.raises(HookError) as caught:
            await runner.score(TASK, candidates("a"), context)
        return caught.value.code

    try:
        assert {*await asyncio.gather(*(code() for _ in range(16)))} == {"hook_timeout"}
        async with asyncio.timeout(10):
            while await code() != "hook_busy":
                pass
    finally:
        release.set()


def test_a_blend_takes_an_attribute_of_a_module_beside_it_anew(tmp_path: Path) -> None:
    (tmp_path / "hooks.yaml").write_text("parts: [{hook: 'mine:Mine', options: {}}]\nsubmit: 'mine:Mine'\n")
    for version in (1, 2):
        (tmp_path / "mine.py").write_text(
            "class Mine:\n"
            f"    def {REWARD}(self, task, candidates, context):\n        ...\n"
            f"    def {SUBMIT}(self, request, context):\n        return [{version}]\n"
        )
        submit: Any = load_hooks(tmp_path / "hooks.yaml").submit
        assert submit(None, None) == [version]


def test_the_digest_of_a_blend_is_of_the_file_and_its_parts(tmp_path: Path) -> None:
    write_helpers(tmp_path / "part", 0.1)
    blend = tmp_path / "hooks.yaml"

    def code(weight: int) -> str:
        other = "hook: tests.reward_hooks.making:Longer, options: {most: 9}"
        blend.write_text(f"parts: [{{hook: part, weight: {weight}}}, {{{other}}}]")
        return load_hooks(blend).code

    first = code(1)
    assert code(2) != first == code(1)
    write_helpers(tmp_path / "part", 0.2)
    assert code(1) != first
