"""Every built-in recovers the known order of the preference set where its signal is; wrong hooks do not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from reward_hooks import Candidate, HookContext, HookRunner, Hooks, Reward, Task, load_hooks
from reward_hooks.loader import BUILT_IN
from reward_hooks.offline import kendall_tau
from reward_hooks.recorded import RecordedGroup, read_groups
from swarm.errors import ConfigError
from tests.reward_hooks.preferences import GROUPS, MAKERS, lines

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "required": ["answer"], "properties": {"answer": {"type": "integer", "minimum": 0}}}
OPTIONS: dict[str, dict[str, Any]] = {
    "length": {"at_most": 10},
    "json": {"keys": ["answer"], "fenced": True},
    "json_schema": {"schema": SCHEMA},
    "matches": {"pattern": r"Answer: \d+"},
    "language": {"language": "en"},
    "words": {"wanted": ["river", "bridge", "stone"]},
    "code": {"limits": {"memory_bytes": 1 << 28}},
}


def groups(name: str, folder: Path) -> list[RecordedGroup]:
    file = folder / "groups.jsonl"
    file.write_text(lines(name), encoding="utf-8")
    return list(read_groups(file))


def hooks_named(name: str) -> Hooks:
    if name == "math" and importlib.util.find_spec("math_verify") is None:
        pytest.skip("math-verify is not installed")
    try:
        return load_hooks(name, OPTIONS.get(name, {}))
    except ConfigError as exc:
        if exc.code != "no_sandbox":
            raise
        pytest.skip(f"this system grants no sandbox: {exc.message}")


async def taus(hooks: Hooks, recorded: Iterable[RecordedGroup]) -> list[float]:
    runner = HookRunner(hooks, 60.0)
    found: list[float] = []
    for group in recorded:
        context = HookContext(num_repeat=len(group.candidates), deadline_seconds=60.0)
        score = await runner.score(group.task, group.candidates, context)
        if group.rank is not None:
            tau = kendall_tau(score.values, [-rank for rank in group.rank])
            assert tau is not None
            found.append(tau)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("code", "math") else ()) for name in MAKERS]
)
async def test_built_ins_recover_the_order(name: str, tmp_path: Path) -> None:
    found = await taus(hooks_named(name), groups(name, tmp_path))
    assert len(found) == GROUPS
    assert mean(found) >= 0.9, found


async def test_a_reversed_hook_recovers_the_opposite_and_a_constant_one_nothing(tmp_path: Path) -> None:
    right, recorded = hooks_named("concise"), groups("concise", tmp_path)

    async def wrong(task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        score = await HookRunner(right).score(task, candidates, context)
        return [Reward(value=-value) for value in score.values]

    assert mean(await taus(Hooks(wrong), recorded)) <= -0.9
    same = Hooks(lambda task, candidates, context: [0.5] * len(candidates))
    assert await taus(same, recorded) == [0.0] * GROUPS


async def test_a_hook_that_rewards_babble_does_not_pass(tmp_path: Path) -> None:
    longest = Hooks(lambda task, candidates, context: [float(len(one.text)) for one in candidates])
    for name in ("length", "repetition"):
        assert mean(await taus(longest, groups(name, tmp_path))) <= 0.0


def test_the_set_covers_every_built_in_without_a_model() -> None:
    assert len(MAKERS) * GROUPS >= 200
    unlabelled = set(BUILT_IN) - set(MAKERS)
    # judges and reward models have tests of their own
    assert all(BUILT_IN[name].startswith("reward_hooks.judges.") for name in unlabelled)
