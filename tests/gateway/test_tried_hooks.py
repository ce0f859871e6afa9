"""A group that was recorded and exported is judged again offline."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.cli.hooks import try_hooks
from reward_hooks.offline import OfflineConfig
from swarm.server.journal.export import export
from tests.gateway.test_seeing_why import BY_LENGTH, answered
from tests.standins.vllm import plain_choice, several
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig


async def test_a_recorded_group_is_judged_again_offline(rig: server.Rig, tmp_path: Path) -> None:
    rig.vllm.script.append(several(plain_choice([1]), plain_choice([1, 2, 3], index=1)))
    hook, _ = await answered(rig, tmp_path, BY_LENGTH)
    data = tmp_path / "groups.jsonl"

    def decode(ids: list[int], *, special: bool) -> str:
        return " ".join(f"t{one}" for one in ids)

    def again() -> None:
        assert export(tmp_path / "journal.db", data, "waiting", decode=decode).groups == 1
        report = try_hooks(hook, data, hook, OfflineConfig(), None, lambda *_: None)
        [group] = report.groups
        assert (group.prompt, group.order, group.tau_rank) == ("hello", [1, 0], 1.0)
        assert [one.reason for one in group.rewards] == ["'t1' has its length", "'t1 t2 t3' has its length"]
        assert (report.tau_rank, report.flip_rate, report.compared) == (1.0, 0.0, 1)

    await asyncio.to_thread(again)
