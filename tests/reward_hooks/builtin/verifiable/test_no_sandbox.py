"""Where there is no sandbox, no code runs, unless that is waived."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reward_hooks.builtin.verifiable import sandbox
from reward_hooks.builtin.verifiable.code import Code
from reward_hooks.builtin.verifiable.sandbox import Sandbox
from swarm.errors import ConfigError
from tests.reward_hooks.builtin.verifiable.having import folder_of_programs
from tests.reward_hooks.making import answered, values


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder of PATH, on a kernel without Landlock."""
    with folder_of_programs("prlimit", "rm") as folder:
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.setattr(sandbox, "_CONFINE", "raise SystemExit('the kernel has no Landlock')")
        yield folder


def test_without_bubblewrap_nothing_runs_unless_it_is_waived(programs: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"namespaces: bwrap is not installed; Landlock: .*no Landlock.*apt-get install bubblewrap.*unsafe: true",
    ) as caught:
        Sandbox()
    assert caught.value.code == "no_sandbox"
    unsafe = Sandbox(unsafe=True)
    assert unsafe.run("print(input())", "1").output == "1\n"
    assert unsafe.run("x = 2", epilogue="__import__('os').write(__result__, str(x).encode())").result == "2"
    assert "MemoryError" in unsafe.run("x = 'a' * (2 << 30)").errors
    where = unsafe.run("import os; print(os.getcwd()); os.mkdir('d'); open('d/f', 'w')").output.strip()
    assert not Path(where).exists()
    # a late program is not asked to end
    stubborn = "import signal, time\nsignal.signal(15, lambda *_: print('late'))\ntime.sleep(300)"
    began = time.monotonic()
    late = unsafe.run(stubborn, seconds=1.0)
    assert (late.status, late.output) == (None, "") and time.monotonic() - began < 60


def test_a_system_that_refuses_namespaces_gives_its_reason(programs: Path) -> None:
    refusing = programs / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    with pytest.raises(ConfigError, match=r"Creating new namespace failed.*user\.max_user_namespaces") as caught:
        Sandbox()
    assert caught.value.code == "no_sandbox"


def test_an_unknown_machine_has_no_filter_and_so_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    with pytest.raises(ConfigError, match="system calls of pdp11 are not known"):
        Sandbox()


def test_the_hook_is_refused_when_it_is_loaded(programs: Path) -> None:
    with pytest.raises(ConfigError, match="bwrap is not installed"):
        Code()
    task = answered([{"call": "add(1, 2)", "returns": 3}], "tests")
    right, wrong = "def add(a, b): return a + b", "def add(a, b): return 4"
    assert values(Code(unsafe=True), [right, wrong], task) == [1.0, 0.0]
