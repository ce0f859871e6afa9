"""A process that knows no ``ajet`` before and after each test that puts the shim in."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from swarm.agentjet.shim import Shim


@pytest.fixture
def no_shim() -> Iterator[None]:
    """Undo :func:`swarm.agentjet.install`."""
    yield
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Shim)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "ajet"]:
        del sys.modules[name]
