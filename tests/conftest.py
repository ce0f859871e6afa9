"""What the fast suite leaves to the slow one, and fixtures every test may use.

The fast suite runs property tests with few examples and leaves out :data:`HEAVY`; ``-m slow`` runs both in full.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import signal
from collections.abc import Generator
from pathlib import Path
from unittest.mock import patch

import pytest
import typer.main
from hypothesis import HealthCheck, is_hypothesis_test, settings

#: Tests whose imports (torch, verl, transformers, SDKs) or work take seconds. The fast suite runs them only when named.
HEAVY = (
    "tests/adapters/verl",
    "tests/adapters/models/test_convert.py",
    "tests/adapters/models/test_decoding.py",
    "tests/gateway/api/test_sdks.py",
    "tests/swarm/server/dataplane/test_sdks.py",
    "tests/gateway/test_openapi_fuzz.py",
    "tests/gateway/tui/test_app.py",
    "tests/gateway/tui/test_hostile.py",
    "tests/reward_hooks/judges/test_bias.py",
    "tests/swarm/server/test_openapi_fuzz.py",
)
#: The marks that all tests of a folder have one of.
_MARKS = {
    "tests/clients": ("clients", "slow"),
    "tests/cluster": ("cluster",),
    "tests/engine": ("engine", "long"),
}
#: The fast suite divides the number of examples of a property test by this.
_FEWER = 10
_ALL_SLOW = re.compile(r"^pytestmark = .*pytest\.mark\.slow\b", re.MULTILINE)

# a shell that runs the tests in the background has SIGINT ignored for them, and so for every process they start
signal.signal(signal.SIGINT, signal.default_int_handler)

# typer puts all commands together anew for each command that a test runs; this stands before typer.testing is imported
patch("typer.main.get_command", functools.cache(typer.main.get_command)).start()

# how long an example takes says more of the machine than of the code
settings.register_profile("all", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("all"), max_examples=100 // _FEWER)


def is_fast(config: pytest.Config) -> bool:
    return "not slow" in config.option.markexpr


def is_left_out(path: str, config: pytest.Config) -> bool:
    """Whether this run neither wants nor names the tests under ``path``: to import them alone takes seconds."""
    asked = config.option.markexpr
    unwanted = [folder for folder, marks in _MARKS.items() if not any(_wants(asked, mark) for mark in marks)]
    folders = (*unwanted, *(HEAVY if is_fast(config) else ()))
    return path.startswith(folders) and not any(argument.startswith(folders) for argument in config.args)


def _wants(asked: str, mark: str) -> bool:
    """Whether the ``-m`` that was ``asked`` for, if any, selects what has this mark."""
    return not asked or (mark in asked and f"not {mark}" not in asked)


def is_slow(path: Path) -> bool:
    """Whether a file says that all its tests are slow; to import what they need takes a second, in every worker."""
    return path.suffix == ".py" and _ALL_SLOW.search(path.read_text(encoding="utf-8")) is not None


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("few" if is_fast(config) else "all")
    if is_fast(config) and Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 2**31:
        # each commit of a journal is synced to the disk, and what these tests kill are processes
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    path = collection_path.relative_to(config.rootpath).as_posix()
    return True if is_left_out(path, config) or (is_fast(config) and is_slow(collection_path)) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collector from looking through what is imported, again and again, for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        is_property = isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)
        if is_fast(config):
            if is_property:
                run_fewer(item)
        elif is_property or item.get_closest_marker("property") or item.nodeid.startswith(HEAVY):
            item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Find what a slow test left open now: found later, another test would fail for it."""
    if not is_fast(item.config):
        gc.collect()


def run_fewer(item: pytest.Function) -> None:
    """Divide the number of examples that the test sets for itself."""
    # hypothesis has no public way to reach the settings of a decorated function
    owner, name = item.obj, "_hypothesis_internal_use_settings"
    if item.cls is not None and hasattr(item.cls, "settings"):  # a state machine
        owner, name = item.cls, "settings"
    own = getattr(owner, name, None)
    if own is not None and own is not settings.default:
        setattr(owner, name, settings(own, max_examples=max(10, own.max_examples // _FEWER)))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
