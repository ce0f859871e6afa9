"""What a machine must have for some tests."""

from __future__ import annotations

import pytest

from reward_hooks.verifiable.sandbox import Sandbox
from swarm.errors import ConfigError


def _missing() -> str:
    try:
        Sandbox()
    except ConfigError as exc:
        return exc.message
    return ""


_MISSING = _missing()
needs_sandbox = pytest.mark.skipif(bool(_MISSING), reason=f"THE SANDBOX IS NOT TESTED HERE: {_MISSING}")
