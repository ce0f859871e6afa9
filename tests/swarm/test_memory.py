"""What a killed process is said to have died of."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm import memory


def test_the_kernels_count_decides_between_a_fact_and_a_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(memory, "_COUNTS", counts)
    assert memory.oom_kills() == 0, "a kernel that does not tell"
    counts.write_text("pgfault 12\noom_kill 3\n")
    before = memory.oom_kills()
    assert before == 3
    assert memory.why_killed(before) == f"if nobody killed it, memory ran out: {memory.CURE}"
    counts.write_text("pgfault 12\noom_kill 4\n")
    assert memory.why_killed(before) == f"memory ran out, and the kernel killed it: {memory.CURE}"
    assert "job.batch_size" in memory.CURE
