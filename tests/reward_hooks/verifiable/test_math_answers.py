"""Mathematical answers, and a worker that hangs, dies or is busy."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from reward_hooks.verifiable.math_answers import Math, _Worker
from swarm.errors import ConfigError, HookError
from tests.reward_hooks.making import answered, values

SERVES = "import sys\nfor line in sys.stdin: print('{\"verdicts\": []}', flush=True)"


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
def test_equal_expressions_are_equal_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the worker is ours, whatever packages there are where the gateway is started
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward_hooks").mkdir()
    (tmp_path / "reward_hooks/__init__.py").write_text("raise SystemExit('imported from the working directory')")
    hook = Math()
    texts = ["It is $\\frac{1}{2}$.", "so 0.5", "2/4", "\\boxed{\\frac{2}{4}}", "50", "no idea", "9^9^9^9^9^9", ""]
    assert values(hook, texts, answered("\\frac{1}{2}")) == [1, 1, 1, 1, 0, 0, 0, 0]
    assert values(hook, ["1,000", "1000.0", "100"], answered([1000, "7"])) == [1, 1, 0]
    with pytest.raises(HookError) as caught:
        values(hook, ["1"], answered("no mathematics at all"))
    assert caught.value.code == "bad_reference"
    with pytest.raises(HookError, match="metadata"):
        values(hook, ["1"], answered(None))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"swarm-gateway\[rewards\]") as caught:
        Math()
    assert caught.value.code == "missing_extra"


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "raise SystemExit", "print('half', end='')"])
def test_a_worker_that_hangs_or_dies_is_an_error_and_the_next_starts_anew(program: str) -> None:
    worker = _Worker([sys.executable, "-S", "-c", program])
    # more than a pipe holds: a worker that hangs does not read
    with pytest.raises(HookError) as caught:
        worker.ask({"answers": ["x" * 1_000_000]}, 0.5)
    assert caught.value.code == "math_worker"
    worker._command = [sys.executable, "-S", "-c", SERVES]
    assert worker.ask({"answers": []}, 20) == {"verdicts": []}


def test_waiting_for_a_busy_worker_ends_at_the_deadline() -> None:
    worker = _Worker([sys.executable, "-S", "-c", SERVES])
    with worker._lock, pytest.raises(HookError, match="busy"):
        worker.ask({}, 0.05)
