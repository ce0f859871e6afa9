"""How many processors count where a process may not use all of them, and what a killed one is said to have died of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm import machine
from swarm.machine import processors


def test_the_kernels_count_decides_between_a_fact_and_a_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(machine, "_COUNTS", counts)
    assert machine.oom_kills() == 0, "a kernel that does not tell"
    counts.write_text("pgfault 12\noom_kill 3\n")
    before = machine.oom_kills()
    assert before == 3
    assert machine.why_killed(before) == f"if nobody killed it, memory ran out: {machine.CURE}"
    counts.write_text("pgfault 12\noom_kill 4\n")
    assert machine.why_killed(before) == f"memory ran out, and the kernel killed it: {machine.CURE}"
    assert "job.batch_size" in machine.CURE


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this process's control group, on a machine with 64 processors of which it may use eight."""
    own = tmp_path / "cgroup"
    own.write_text("1:cpu:/elsewhere\n0::/system.slice/swarm.service\n")
    monkeypatch.setattr(machine, "_OWN_GROUP", own)
    monkeypatch.setattr(machine, "_GROUPS", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    folder = tmp_path / "system.slice" / "swarm.service"
    folder.mkdir(parents=True)
    return folder


def test_those_that_it_is_bound_to_count(group: Path) -> None:
    assert processors() == 8


@pytest.mark.parametrize(
    ("limit", "count"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_no_more_count_than_the_quota_of_its_control_group(group: Path, limit: str, count: int) -> None:
    (group / "cpu.max").write_text(f"{limit}\n")
    assert processors() == count


def test_a_container_is_the_root_of_its_groups(group: Path, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert processors() == 2
